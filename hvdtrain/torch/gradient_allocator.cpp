/* An allocator for PyTorch's memory on the CPU that puts gradients where the ranks of a node add
 * them, so that they need not be copied there.
 *
 * It serves allocations whose size is that of a gradient, made by a thread that executes a backward
 * pass; PyTorch's own allocator serves all others, and those for which no block is left. Where
 * several optimizers have gradients of one size, an allocation does not say whose it is: that
 * follows from the order in earlier passes.
 */

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <unordered_map>

#include "arena.h"

namespace torch::autograd {
int get_current_graph_task_id(); /* -1 outside of backward passes */
}

namespace {

void release(void *block);

/* Which arenas serve a backward pass. Passes may be of several kinds, such as those of a generator
 * and of a discriminator, so what follows depends on all of the pass so far and the one before. */
class Order {
   public:
    /* Return a block for the next allocation of a pass; 0 if there is none. */
    void *serve(size_t bytes, int pass) {
        std::lock_guard<std::mutex> guard(mutex_);
        if (pass != pass_) {
            pass_ = pass;
            history_ = 0;
            for (const Served &one : served_) history_ = mix(history_, one.arena);
            served_.clear();
        }
        auto known = known_.find(history_);
        Arena *arena = known != known_.end() ? known->second
                       : served_.empty()     ? nullptr
                                             : served_.back().arena;
        void *block = take(bytes, arena);
        served_.push_back({history_, arena, block});
        history_ = mix(history_, arena);
        return block;
    }

    /* Note that the gradient in a block was one of another arena. */
    void learn(void *block, Arena *arena) {
        std::lock_guard<std::mutex> guard(mutex_);
        size_t at = served_.size();
        while (at && served_[at - 1].block != block) at--;
        if (!at) return;
        if (known_.size() >= MOST) known_.clear();
        history_ = served_[--at].history;
        known_[history_] = served_[at].arena = arena;
        for (; at < served_.size(); at++) {
            served_[at].history = history_;
            history_ = mix(history_, served_[at].arena);
        }
    }

   private:
    struct Served {
        size_t history; /* hash of the arenas before */
        Arena *arena;   /* 0 for any; it may be closed by now */
        void *block;
    };

    static size_t mix(size_t history, const Arena *next) {
        return (history ^ reinterpret_cast<size_t>(next)) * 0x9E3779B97F4A7C15 + 1;
    }

    static constexpr size_t MOST = 1 << 16;
    std::mutex mutex_;
    int pass_ = -1;
    size_t history_ = 0;
    std::vector<Served> served_;
    std::unordered_map<size_t, Arena *> known_; /* by history */
};

Order &order = *new Order;

struct GradientAllocator final : c10::Allocator {
    c10::Allocator *const others = c10::GetCPUAllocator();

    c10::DataPtr allocate(size_t bytes) override {
        if (bytes >= least.load(std::memory_order_relaxed))
            if (int pass = torch::autograd::get_current_graph_task_id(); pass != -1)
                if (void *block = order.serve(bytes, pass))
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

extern "C" {

/* Serve an arena's gradients in the same place of later passes from it. */
void hvd_learn(void *gradient, Arena *arena) { order.learn(gradient, arena); }

}
