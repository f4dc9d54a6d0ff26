/* An allocator for TensorFlow's memory on the CPU that puts gradients where the ranks of a node add
 * them, so that they need not be copied there.
 *
 * It serves allocations whose size is that of a gradient, made by operations that have made
 * gradients before. Other tensors of that size, such as the state of an optimizer, would occupy its
 * blocks for longer. The allocator that TensorFlow would use without it serves all others, and
 * those for which no block is left.
 */

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "arena.h"
#include "tensorflow/core/framework/allocator_registry.h"
#include "tensorflow/core/profiler/lib/scoped_memory_debug_annotation.h"

namespace {

using Registry = tsl::AllocatorFactoryRegistry;

/* Explicit instantiations may name private members. TensorFlow ends the process if an allocator is
 * registered after the first allocation, and does not say by itself which other ones there are. */
bool &first_allocation_made(Registry &);
auto &factories(Registry &);

template <auto made, auto list>
struct Access {
    friend bool &first_allocation_made(Registry &registry) { return registry.*made; }
    friend auto &factories(Registry &registry) { return registry.*list; }
};
template struct Access<&Registry::first_alloc_made_, &Registry::factories_>;

/* In TensorFlow 2.19 it is a pointer, which may be null. */
std::string_view text_of(const char *name) { return name ? name : ""; }
std::string_view text_of(const auto &name) { return {name.data(), name.size()}; }

/* The operation that allocates in this thread, as a hash of its name. */
size_t current_operation() {
    auto name = tsl::profiler::ScopedMemoryDebugAnnotation::CurrentAnnotation().pending_op_name;
    return std::hash<std::string_view>()(text_of(name));
}

/* Which operations make gradients. */
class Makers {
   public:
    bool makes_gradients(size_t operation) {
        std::lock_guard<std::mutex> guard(mutex_);
        return of_gradients_.count(operation) > 0;
    }

    void note(void *block, size_t operation) {
        std::lock_guard<std::mutex> guard(mutex_);
        if (made_.size() >= MOST) made_.clear(); /* most of these blocks are freed */
        made_[block] = operation;
    }

    void learn(void *gradient) {
        std::lock_guard<std::mutex> guard(mutex_);
        auto found = made_.find(gradient);
        if (found != made_.end()) of_gradients_.insert(found->second);
    }

   private:
    static constexpr size_t MOST = 1 << 16;
    std::mutex mutex_;
    std::unordered_map<void *, size_t> made_; /* by which operation */
    std::unordered_set<size_t> of_gradients_;
};

Makers &makers = *new Makers;

/* Return the size of a block of an arena; 0 for others. */
size_t size_of(const char *block) {
    if (!is_near(block)) return 0;
    std::lock_guard<std::mutex> guard(mutex);
    size_t number;
    const Pool *pool = find_pool(block, number);
    return pool ? pool->bytes : 0;
}

struct GradientAllocator final : tsl::AllocatorWrapper {
    using tsl::AllocatorWrapper::AllocatorWrapper;

    void *AllocateRaw(size_t alignment, size_t bytes) override {
        return allocate(alignment, bytes, [&] { return wrapped()->AllocateRaw(alignment, bytes); });
    }

    void *AllocateRaw(size_t alignment, size_t bytes,
                      const tsl::AllocationAttributes &attributes) override {
        return allocate(alignment, bytes,
                        [&] { return wrapped()->AllocateRaw(alignment, bytes, attributes); });
    }

    void DeallocateRaw(void *block) override {
        if (!give_back(static_cast<char *>(block))) wrapped()->DeallocateRaw(block);
    }

    /* The other allocator does not know the blocks of arenas. Profiles ask for the second. */
    bool TracksAllocationSizes() const override { return false; }
    size_t AllocatedSizeSlow(const void *block) const override {
        size_t bytes = size_of(static_cast<const char *>(block));
        return bytes ? bytes : wrapped()->AllocatedSizeSlow(block);
    }

    std::optional<tsl::AllocatorStats> GetStats() override { return wrapped()->GetStats(); }
    bool ClearStats() override { return wrapped()->ClearStats(); }

   private:
    template <typename Other>
    static void *allocate(size_t alignment, size_t bytes, Other other) {
        if (forked || bytes < least.load(std::memory_order_relaxed) || alignment > ALIGNMENT)
            return other();
        size_t operation = current_operation();
        if (makers.makes_gradients(operation))
            if (void *block = take(bytes)) return block;
        void *block = other();
        makers.note(block, operation);
        return block;
    }
};

struct Factory final : tsl::AllocatorFactory {
    static constexpr const char *name = "hvdtrain";

    /* The registry is locked meanwhile. */
    tsl::Allocator *CreateAllocator() override { return new GradientAllocator(other()); }

    tsl::SubAllocator *CreateSubAllocator(int node) override {
        return best()->CreateSubAllocator(node);
    }

    bool NumaEnabled() override { return best()->NumaEnabled(); }

   private:
    /* Return the factory that TensorFlow would use without this one. */
    static tsl::AllocatorFactory *best() {
        tsl::AllocatorFactory *found = nullptr;
        int priority = 0;
        for (auto &entry : factories(*Registry::singleton())) {
            if (entry.name == name || (found && entry.priority <= priority)) continue;
            found = entry.factory.get();
            priority = entry.priority;
        }
        return found;
    }

    static tsl::Allocator *other() { return best()->CreateAllocator(); }
};

constexpr int PRIORITY = 1000; /* those of TensorFlow are at most 200 */

void serve(bool) {}

}  // namespace

extern "C" {

/* Let TensorFlow use this allocator; 0 if it has allocated memory before. */
int32_t hvd_register(void) {
    Registry &registry = *Registry::singleton();
    if (first_allocation_made(registry)) return 0;
    registry.Register(__FILE__, __LINE__, Factory::name, PRIORITY, new Factory);
    return 1;
}

/* Serve allocations of the operation that has made a gradient. */
void hvd_learn(void *gradient, Arena *) { makers.learn(gradient); }

/* Allocate as an operation of TensorFlow with a name of its own would. Without a name, what is
 * learned of it would hold for all tensors that no operation makes. */
void *hvd_allocate(uint64_t bytes) {
    tsl::profiler::ScopedMemoryDebugAnnotation operation("hvdtrain/trial");
    return tsl::cpu_allocator()->AllocateRaw(tsl::Allocator::kAllocatorAlignment, bytes);
}

void hvd_deallocate(void *block) { tsl::cpu_allocator()->DeallocateRaw(block); }

}
