/* Arenas: memory that the ranks of a node map, and that serves a framework's allocations.
 *
 * An arena has blocks of some sizes, and serves allocations of exactly these sizes while it is
 * open. One that was closed stays mapped until its last block is returned.
 */

#ifndef HVD_ARENA_H
#define HVD_ARENA_H

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace {

constexpr size_t ALIGNMENT = 64; /* of all blocks, at least */

/* Blocks of one size, next to each other. */
struct Pool {
    size_t bytes;
    char *begin, *end;
    std::vector<char *> free; /* the last one returned is the first to be used again */
};

struct Arena {
    char *base;
    size_t bytes;
    std::vector<Pool> pools;
    size_t used = 0; /* number of blocks */
    bool open = true;
};

/* Neither is destroyed: at the end of the process memory may be freed later. */
std::mutex &mutex = *new std::mutex;
std::vector<Arena *> &arenas = *new std::vector<Arena *>;

std::atomic<size_t> least{SIZE_MAX}; /* size of the smallest block of any open arena */
/* All arenas there have been lie between these addresses. */
std::atomic<char *> lowest{reinterpret_cast<char *>(UINTPTR_MAX)}, highest{nullptr};
bool forked = false;

/* To be defined by the file that includes this one; called with the mutex held when the number of
 * open arenas may have changed: ask for a block before each allocation, or no more. */
void serve(bool any);

/* Return a block, from one arena if that has one; 0 if there is none. */
void *take(size_t bytes, const Arena *first = nullptr) {
    std::lock_guard<std::mutex> guard(mutex);
    if (forked) return nullptr; /* the parent would see what a child writes */
    for (bool others : {false, true})
        for (Arena *arena : arenas) {
            if (!arena->open || (arena != first) != others) continue;
            for (Pool &pool : arena->pools) {
                if (pool.bytes != bytes || pool.free.empty()) continue;
                char *block = pool.free.back();
                pool.free.pop_back();
                arena->used++;
                return block;
            }
        }
    return nullptr;
}

/* With the mutex held: serve the open arenas. */
void follow_arenas() {
    size_t smallest = SIZE_MAX;
    for (const Arena *arena : arenas)
        for (const Pool &pool : arena->pools)
            if (arena->open && pool.bytes < smallest) smallest = pool.bytes;
    least.store(smallest, std::memory_order_relaxed);
    serve(smallest != SIZE_MAX);
}

/* With the mutex held: free a closed arena without blocks in use. */
void remove_unused(size_t number) {
    Arena *arena = arenas[number];
    if (arena->open || arena->used) return;
    munmap(arena->base, arena->bytes);
    arenas.erase(arenas.begin() + number);
    delete arena;
}

/* Whether a block may be of an arena; if not, no mutex is needed. */
bool is_near(const char *block) {
    return block >= lowest.load(std::memory_order_relaxed) &&
           block < highest.load(std::memory_order_relaxed);
}

/* With the mutex held: return the pool of a block and set the number of its arena; 0 if the block
 * is of none. */
Pool *find_pool(const char *block, size_t &number) {
    for (number = 0; number < arenas.size(); number++)
        for (Pool &pool : arenas[number]->pools)
            if (block >= pool.begin && block < pool.end) return &pool;
    return nullptr;
}

/* Return a block to its arena; whether it was from one. */
bool give_back(char *block) {
    if (!is_near(block)) return false;
    std::lock_guard<std::mutex> guard(mutex);
    size_t number;
    Pool *pool = find_pool(block, number);
    if (!pool) return false;
    pool->free.push_back(block);
    arenas[number]->used--;
    remove_unused(number);
    return true;
}

/* A forked child may use memory while another thread of its parent holds a mutex. */
void before_fork() { mutex.lock(); }
void after_fork_in_parent() { mutex.unlock(); }
void after_fork_in_child() {
    forked = true;
    least = SIZE_MAX; /* no allocation asks for a block */
    mutex.unlock();
}

}  // namespace

extern "C" {

/* Open an arena in shared memory, which may be unmapped afterwards; 0 if the system refuses.
 *
 * memory: beginning of a shared mapping of so many bytes, at a page.
 * sizes, strides, counts: of each of `kinds` kinds of blocks the bytes that are requested, those
 *     from one to the next, and the number. */
void *hvd_arena_open(char *memory, uint64_t bytes, const uint64_t *sizes, const uint64_t *strides,
                     const uint64_t *counts, int32_t kinds) {
    static bool prepared = !pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    /* The old size 0 maps the same pages once more, for as long as blocks are in use. */
    void *mapped = prepared ? mremap(memory, 0, bytes, MREMAP_MAYMOVE) : MAP_FAILED;
    if (mapped == MAP_FAILED) return nullptr;
#ifdef MADV_POPULATE_WRITE
    madvise(mapped, bytes, MADV_POPULATE_WRITE);
#endif
    Arena *arena = new Arena{static_cast<char *>(mapped), bytes, {}};
    char *at = arena->base;
    for (int32_t kind = 0; kind < kinds; kind++) {
        Pool pool{sizes[kind], at, at + counts[kind] * strides[kind], {}};
        for (at = pool.end; at > pool.begin;) pool.free.push_back(at -= strides[kind]);
        at = pool.end;
        arena->pools.push_back(pool);
    }
    std::lock_guard<std::mutex> guard(mutex);
    lowest = std::min(lowest.load(), arena->base);
    highest = std::max(highest.load(), arena->base + bytes);
    arenas.push_back(arena);
    follow_arenas();
    return arena;
}

/* Let an arena serve allocations before all others. */
void hvd_arena_prefer(Arena *arena) {
    std::lock_guard<std::mutex> guard(mutex);
    auto place = std::find(arenas.begin(), arenas.end(), arena);
    std::rotate(arenas.begin(), place, place + 1);
}

/* Return the address of the first block. */
char *hvd_arena_base(const Arena *arena) { return arena->base; }

/* Return the number of blocks in use. */
uint64_t hvd_arena_used(const Arena *arena) {
    std::lock_guard<std::mutex> guard(mutex);
    return arena->used;
}

/* Let an arena serve no more allocations; its memory is unmapped with the last block in use. */
void hvd_arena_close(Arena *arena) {
    std::lock_guard<std::mutex> guard(mutex);
    arena->open = false;
    follow_arenas();
    for (size_t number = arenas.size(); number-- > 0;)
        if (arenas[number] == arena) remove_unused(number);
}

/* Return the number of arenas that are mapped. */
uint64_t hvd_arenas(void) {
    std::lock_guard<std::mutex> guard(mutex);
    return arenas.size();
}

}

#endif
