/* An allocator for PyTorch's memory on the CPU that puts gradients where the ranks of a node add
 * them, so that they need not be copied there.
 *
 * It serves allocations whose size is that of a gradient, made by a thread that executes a backward
 * pass; PyTorch's own allocator serves all others, and those for which no block is left.
 */

#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "arena.h"

namespace torch::autograd {
int get_current_graph_task_id(); /* -1 outside of backward passes */
}

namespace {

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

/* An allocator that the program has set since stays. */
void serve(bool any) {
    c10::Allocator *others = allocator.others, *own = &allocator;
    if (c10::GetCPUAllocator() == (any ? others : own)) c10::SetCPUAllocator(any ? own : others);
}

/* Also called for blocks of the other allocator that were requested without their deleter. */
void release(void *block) {
    if (!give_back(static_cast<char *>(block))) allocator.others->raw_deallocate(block);
}

}  // namespace
