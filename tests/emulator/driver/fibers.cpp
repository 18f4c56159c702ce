// The threads of a block: fibers on the calling thread, each run until it waits or ends.
#define EMULATED_CONSTANT
#include "fibers.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "memory.hpp"
#include "products.hpp"
#include "races.hpp"

extern "C" {
uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
unsigned char *emulated_dynamic_shared;

// Address sanitizer's, where it is loaded: it must know which stack is in use.
__attribute__((weak)) void __sanitizer_start_switch_fiber(void **fake, const void *bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void *fake, const void **bottom, size_t *size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void *start, size_t size);

void emulated_switch(void **save, void *load);
}

#ifndef __x86_64__
#error "the emulated GPU switches between its threads in x86-64 assembly"
#endif
asm(R"(
    .text
    .globl emulated_switch
    .type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulated_switch, . - emulated_switch
)");

namespace emulated {
namespace {

thread_local bool running_here = false;

constexpr size_t STACK = 256 << 10, PAGE = 4096;

struct Exchange {
    Warp function;
    unsigned mask, arrived, left;
    unsigned long long value[32];
    races::Clocks met;
};

enum class State { ready, barrier, exchange, warpgroup, done };

struct Fiber {
    State state;
    void *stack_pointer, *fake_stack;
    unsigned char *stack;
    uint3 index;
    int predicate;
    Votes votes;
    Exchange *exchange;
    std::vector<Copy> copies;
};

struct Warps {
    unsigned alive;
    std::vector<Exchange *> exchanges;
};

// One block at a time, whatever thread launches it.
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warps> warps;
    std::vector<unsigned char *> free_stacks;
    std::vector<Exchange *> free_exchanges;
    std::vector<std::pair<void *, size_t>> shared;
    size_t shared_bytes, dynamic_shared;
    unsigned alive, waiting, current, barriers;
    void *scheduler;
    void *scheduler_fake;
    const void *scheduler_bottom;
    size_t scheduler_size;
    const Kernel *kernel;
    void **arguments;
    int error;
    std::string message;
} block;

unsigned char *new_stack() {
    if (!block.free_stacks.empty()) {
        auto stack = block.free_stacks.back();
        block.free_stacks.pop_back();
        return stack;
    }
    static unsigned count = 0;
    void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) {
        perror("emulated GPU: a thread's stack");
        abort();
    }
    mprotect(stack, PAGE, PROT_NONE);
    // Their tops at different offsets, for else they would all compete for the same cache lines.
    return static_cast<unsigned char *>(stack) + STACK - (count++ % 61) * 192;
}

void to_scheduler(Fiber &fiber, bool for_good) {
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, block.scheduler_bottom,
                                       block.scheduler_size);
    emulated_switch(&fiber.stack_pointer, block.scheduler);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(fiber.fake_stack, &block.scheduler_bottom, &block.scheduler_size);
}

void wait(State state) {
    Fiber &fiber = block.fibers[block.current];
    fiber.state = state;
    to_scheduler(fiber, false);
}

void fiber_main() {
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_bottom, &block.scheduler_size);
    block.kernel->call(block.arguments);
    Fiber &fiber = block.fibers[block.current];
    fiber.state = State::done;
    to_scheduler(fiber, true);
    abort(); // never resumed
}

void resume(unsigned thread) {
    Fiber &fiber = block.fibers[thread];
    if (!fiber.stack) {
        fiber.stack = new_stack();
        void **top = reinterpret_cast<void **>(reinterpret_cast<size_t>(fiber.stack) & ~size_t(15));
        *--top = nullptr; // in a return address's place: the stack is aligned as after a call
        *--top = reinterpret_cast<void *>(fiber_main);
        for (int i = 0; i < 6; i++)
            *--top = nullptr;
        fiber.stack_pointer = top;
    }
    block.current = thread;
    threadIdx = fiber.index;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(&block.scheduler_fake, fiber.stack - STACK + 61 * 192, STACK - 61 * 192);
    running_here = true;
    emulated_switch(&block.scheduler, fiber.stack_pointer);
    running_here = false;
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(block.scheduler_fake, nullptr, nullptr);
    if (fiber.state != State::done)
        return;
    block.free_stacks.push_back(fiber.stack);
    fiber.stack = nullptr;
    block.alive--;
    block.warps[thread / 32].alive &= ~(1u << thread % 32);
}

bool complete(const Exchange &exchange, const Warps &warp) {
    return (exchange.mask & warp.alive & ~exchange.arrived) == 0;
}

void release_barrier() {
    Votes votes{static_cast<int>(block.waiting), 0};
    for (const Fiber &fiber : block.fibers)
        votes.yes += fiber.state == State::barrier && fiber.predicate;
    for (Fiber &fiber : block.fibers)
        if (fiber.state == State::barrier) {
            fiber.votes = votes;
            fiber.state = State::ready;
        }
    products::barrier(block.waiting);
    block.waiting = 0;
    block.barriers++;
    races::barrier();
}

std::string stuck() {
    unsigned at_warp = 0, at_group = 0, first = block.fibers.size();
    for (unsigned i = 0; i < block.fibers.size(); i++)
        if (block.fibers[i].state == State::warpgroup) {
            at_group++;
        } else if (block.fibers[i].state == State::exchange) {
            at_warp++;
            first = std::min(first, i);
        }
    std::string text = "threads wait for one another: " + std::to_string(block.waiting) + " at a barrier, " +
                       std::to_string(at_warp) + " at a warp function, " +
                       (at_group ? std::to_string(at_group) + " at products that their warpgroup has not begun, " : "") +
                       std::to_string(block.fibers.size() - block.alive) + " have ended";
    if (at_warp) {
        char mask[160];
        auto exchange = block.fibers[first].exchange;
        snprintf(mask, sizeof mask, "; thread %u has lanes %#x to wait for, of which %#x came", first, exchange->mask,
                 exchange->arrived);
        text += mask;
    }
    return text;
}

using Random = std::mt19937_64;

void schedule(Random *random) {
    std::vector<unsigned> order(block.fibers.size());
    std::iota(order.begin(), order.end(), 0);
    while (block.alive) {
        if (random)
            std::shuffle(order.begin(), order.end(), *random);
        bool progress = false;
        for (unsigned thread : order) {
            Fiber &fiber = block.fibers[thread];
            if (fiber.state == State::exchange && complete(*fiber.exchange, block.warps[thread / 32]))
                fiber.state = State::ready;
            if (fiber.state == State::warpgroup && products::begun(thread))
                fiber.state = State::ready;
            if (fiber.state != State::ready)
                continue;
            progress = true;
            resume(thread);
            if (block.error)
                return;
        }
        if (block.alive && block.waiting == block.alive)
            release_barrier();
        else if (!progress) {
            block.error = LAUNCH_FAILED;
            block.message = stuck();
            return;
        }
    }
}

void start_block(unsigned threads) {
    block.fibers.assign(threads, Fiber{});
    block.warps.assign((threads + 31) / 32, Warps{});
    for (unsigned i = 0; i < threads; i++) {
        block.fibers[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
        block.warps[i / 32].alive |= 1u << i % 32;
    }
    block.alive = threads;
    block.waiting = 0;
    block.shared.clear();
    block.shared_bytes = 0;
    block.barriers = 0;
    products::begin_block();
    races::begin_block();
}

void end_block() {
    for (Fiber &fiber : block.fibers)
        if (fiber.stack) // abandoned in the middle
            block.free_stacks.push_back(fiber.stack);
    for (Warps &warp : block.warps)
        for (Exchange *exchange : warp.exchanges)
            block.free_exchanges.push_back(exchange);
}

Exchange *new_exchange(Warp function, unsigned mask) {
    Exchange *exchange;
    if (block.free_exchanges.empty()) {
        exchange = new Exchange;
    } else {
        exchange = block.free_exchanges.back();
        block.free_exchanges.pop_back();
    }
    exchange->function = function, exchange->mask = mask;
    exchange->arrived = exchange->left = 0;
    if (function == Warp::sync)
        exchange->met = {};
    return exchange;
}

} // namespace

bool in_kernel() { return running_here; }

unsigned current_thread() { return block.current; }
unsigned threads() { return block.fibers.size(); }
unsigned barriers() { return block.barriers; }
void wait_for_warpgroup() { wait(State::warpgroup); }

std::vector<std::pair<const unsigned char *, size_t>> shared_memory() {
    std::vector<std::pair<const unsigned char *, size_t>> all;
    for (auto &[variable, size] : block.shared)
        all.emplace_back(static_cast<const unsigned char *>(variable), size);
    all.emplace_back(emulated_dynamic_shared, block.dynamic_shared);
    return all;
}

const unsigned char *shared_byte(unsigned address) {
    auto within = [&](const void *start, size_t size) {
        auto first = static_cast<const unsigned char *>(start);
        size_t at = (address - reinterpret_cast<size_t>(first)) & 0x3ffff;
        return at < size ? first + at : nullptr;
    };
    const unsigned char *byte = within(emulated_dynamic_shared, block.dynamic_shared);
    for (auto &[variable, size] : block.shared)
        byte = byte ? byte : within(variable, size);
    return byte;
}

bool on_stack(unsigned long address) {
    return reinterpret_cast<unsigned long>(block.fibers[block.current].stack) - address < STACK;
}

Outcome run(const Launch &launch, unsigned long long seed) {
    block.kernel = launch.kernel;
    block.arguments = launch.arguments;
    gridDim = launch.grid;
    blockDim = launch.block;
    unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    std::vector<unsigned long> blocks(size_t(gridDim.x) * gridDim.y * gridDim.z);
    std::iota(blocks.begin(), blocks.end(), 0);
    Random random(seed);
    if (seed)
        std::shuffle(blocks.begin(), blocks.end(), random);
    DynamicShared dynamic(launch.dynamic_shared);
    block.dynamic_shared = launch.dynamic_shared;
    emulated_dynamic_shared = dynamic.start;
    races::begin_launch(dynamic.start, launch.dynamic_shared);
    block.error = 0;
    block.message.clear();
    for (unsigned long i : blocks) {
        blockIdx = {static_cast<unsigned>(i % gridDim.x), static_cast<unsigned>(i / gridDim.x % gridDim.y),
                    static_cast<unsigned>(i / gridDim.x / gridDim.y)};
        memset(dynamic.start, GARBAGE, launch.dynamic_shared);
        start_block(threads);
        schedule(seed ? &random : nullptr);
        end_block();
        if (block.error)
            break;
    }
    if (!block.error)
        return {};
    char where[160];
    snprintf(where, sizeof where, "block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x, blockIdx.y, blockIdx.z,
             threadIdx.x, threadIdx.y, threadIdx.z);
    return {block.error, where + block.message};
}

void fail(int error, const std::string &message) {
    Fiber &fiber = block.fibers[block.current];
    block.error = error;
    block.message = message;
    if (__asan_unpoison_memory_region) // what the frames that are left behind had poisoned
        __asan_unpoison_memory_region(fiber.stack - STACK + 61 * 192 + PAGE, STACK - 61 * 192 - PAGE);
    to_scheduler(fiber, true);
    abort();
}

extern "C" {

Votes emulated_barrier(int predicate) {
    Fiber &fiber = block.fibers[block.current];
    fiber.predicate = predicate;
    block.waiting++;
    wait(State::barrier);
    return fiber.votes;
}

namespace {
unsigned long long shared_window; // the upper half of every address of shared memory in this launch
}

unsigned emulated_shared_address(const void *pointer) {
    auto address = reinterpret_cast<unsigned long long>(pointer);
    shared_window = address >> 32;
    return address;
}

void *emulated_shared_pointer(unsigned address) { return reinterpret_cast<void *>(shared_window << 32 | address); }

void emulated_begin_copy(const Copy &copy) {
    products::copy_begins(copy.to);
    block.fibers[block.current].copies.push_back(copy);
}

bool emulated_next_copy(Copy *copy) {
    auto &copies = block.fibers[block.current].copies;
    if (copies.empty())
        return false;
    *copy = copies.back();
    copies.pop_back();
    products::copy_arrives(copy->to);
    return true;
}

unsigned emulated_lane() { return block.current % 32; }

unsigned emulated_active_lanes() { return block.warps[block.current / 32].alive; }

void emulated_yield() { wait(State::ready); }

Lanes emulated_exchange(Warp function, unsigned mask, unsigned long long value) {
    Warps &warp = block.warps[block.current / 32];
    unsigned lane = block.current % 32;
    if (!(mask >> lane & 1))
        emulated_fail(LAUNCH_FAILED, "a warp function's mask %#x does not name lane %u, which calls it", mask, lane);
    Exchange *exchange = nullptr;
    for (Exchange *open : warp.exchanges)
        if (open->mask == mask && !(open->arrived >> lane & 1) && !complete(*open, warp))
            exchange = open;
    if (!exchange) {
        exchange = new_exchange(function, mask);
        warp.exchanges.push_back(exchange);
    }
    if (exchange->function != function)
        emulated_fail(LAUNCH_FAILED, "lanes of one warp (mask %#x) are at different warp functions", mask);
    exchange->arrived |= 1u << lane;
    exchange->value[lane] = value;
    if (function == Warp::sync)
        races::arrive(exchange->met);
    Fiber &fiber = block.fibers[block.current];
    fiber.exchange = exchange;
    if (!complete(*exchange, warp))
        wait(State::exchange);
    Lanes lanes;
    lanes.present = exchange->arrived, lanes.first = !exchange->left;
    memcpy(lanes.value, exchange->value, sizeof lanes.value);
    if (function == Warp::sync)
        races::leave(exchange->met);
    exchange->left |= 1u << lane;
    if (exchange->left == exchange->arrived) {
        auto &all = block.warps[block.current / 32].exchanges;
        all.erase(std::find(all.begin(), all.end(), exchange));
        block.free_exchanges.push_back(exchange);
    }
    return lanes;
}

void emulated_shared(void *variable, unsigned long size) {
    for (auto &[known, _] : block.shared)
        if (known == variable)
            return;
    block.shared.emplace_back(variable, size);
    block.shared_bytes += size;
    if (block.shared_bytes > (48 << 10))
        emulated_fail(LAUNCH_FAILED, "%zu bytes of static shared memory: a kernel has 49152", block.shared_bytes);
    memset(variable, GARBAGE, size);
    races::add_shared(variable, size);
}

void emulated_fail(int error, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fail(error, text);
}
}

} // namespace emulated
