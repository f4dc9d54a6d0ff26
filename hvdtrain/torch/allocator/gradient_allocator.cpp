/* An allocator for PyTorch's memory on the CPU that puts gradients where the ranks of a node add
 * them, so that they need not be copied there.
 *
 * An arena is memory that all ranks of the node map. It serves allocations whose size is that of a
 * gradient, made by a thread that executes a backward pass; PyTorch's own allocator serves all
 * others, and those for which no block is left. An arena that was closed stays mapped until its
 * last block is returned.
 */

#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace torch::autograd {
int get_current_graph_task_id(); /* -1 outside of backward passes */
}

namespace {

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
bool forked = false;

void *take(size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    if (forked) return nullptr; /* the parent would see what a child writes */
    for (Arena *arena : arenas) {
        if (!arena->open) continue;
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

void release(void *block);

struct GradientAllocator final : c10::Allocator {
    c10::Allocator *const others = c10::GetCPUAllocator();

    c10::DataPtr allocate(size_t bytes) override {
        if (bytes >= least.load(std::memory_order_relaxed) &&
            torch::autograd::get_current_graph_task_id() != -1)
            if (void *block = take(bytes))
                return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
        return others->allocate(bytes);
    }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void copy_data(void *target, const void *source, size_t bytes) const override {
        std::memcpy(target, source, bytes);
    }
};

GradientAllocator &allocator = *new GradientAllocator;

/* With the mutex held: serve the open arenas, or leave if there are none. An allocator that the
 * program has set since stays. */
void follow_arenas() {
    size_t smallest = SIZE_MAX;
    for (const Arena *arena : arenas)
        for (const Pool &pool : arena->pools)
            if (arena->open && pool.bytes < smallest) smallest = pool.bytes;
    least.store(smallest, std::memory_order_relaxed);
    c10::Allocator *others = allocator.others, *own = &allocator;
    bool serves = smallest != SIZE_MAX;
    if (c10::GetCPUAllocator() == (serves ? others : own))
        c10::SetCPUAllocator(serves ? own : others);
}

/* With the mutex held: free a closed arena without blocks in use. */
void remove_unused(size_t number) {
    Arena *arena = arenas[number];
    if (arena->open || arena->used) return;
    munmap(arena->base, arena->bytes);
    arenas.erase(arenas.begin() + number);
    delete arena;
}

/* Return a block to its arena; whether it was from one. */
bool give_back(char *block) {
    std::lock_guard<std::mutex> guard(mutex);
    for (size_t number = 0; number < arenas.size(); number++) {
        Arena *arena = arenas[number];
        for (Pool &pool : arena->pools) {
            if (block < pool.begin || block >= pool.end) continue;
            pool.free.push_back(block);
            arena->used--;
            remove_unused(number);
            return true;
        }
    }
    return false;
}

/* Also called for blocks of the other allocator that were requested without their deleter. */
void release(void *block) {
    if (!give_back(static_cast<char *>(block))) allocator.others->raw_deallocate(block);
}

/* A forked child may use memory while another thread of its parent holds the mutex. */
void before_fork() { mutex.lock(); }
void after_fork_in_parent() { mutex.unlock(); }
void after_fork_in_child() {
    forked = true;
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
