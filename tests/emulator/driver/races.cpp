#include "races.hpp"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory.hpp"

namespace emulated::races {
namespace {

// The latest access of a kind: by whom, where in its code, and when.
struct Access {
    uint32_t block = 0, epoch = 0; // blocks and barriers, counted
    uint32_t code = 0;             // the lower half of an address
    uint16_t clock = 0;            // how often the thread came to a `__syncwarp`
    uint16_t thread : 15, atomic : 1;
};

// Of a byte. Two readers of two warps, if there are: whoever writes is another than one of them.
struct Byte {
    Access write, reads[2];
};

constexpr size_t PAGE = 4096, MOST_PAGES = 4096;
struct Page {
    std::array<Byte, PAGE> bytes;
    uint32_t launch; // the first block of the one that last touched it
    bool device;     // and whether it was the device's memory then
};

struct Range {
    uintptr_t start, size;
    bool contains(uintptr_t address) const { return address - start < size; }
};

// Of the launch, one at a time.
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
uintptr_t known_number; // of the page that was touched last
Page *known_page = nullptr;
std::vector<Range> shared;
uint32_t block = 0, first_block = 1, epoch = 0;
struct Thread {
    uint16_t clock;
    Clocks seen;
};
std::vector<Thread> threads(1024);

bool is_shared(uintptr_t address) {
    for (const Range &range : shared)
        if (range.contains(address))
            return true;
    return false;
}

bool ordered(const Access &before, unsigned me, uintptr_t address) {
    if (before.block != block) // which never wait for one another
        return before.block < first_block || is_shared(address);
    if (before.epoch != epoch || before.thread == me)
        return true;
    return before.thread / 32 == me / 32 && threads[me].seen[before.thread % 32] >= before.clock;
}

// FILE:LINE of an instruction before `code`.
std::string place(uintptr_t code) {
    Dl_info info;
    char line[256] = "";
    if (!dladdr(reinterpret_cast<void *>(code), &info))
        return "?";
    uintptr_t offset = code - 1 - reinterpret_cast<uintptr_t>(info.dli_fbase);
    char command[4608];
    snprintf(command, sizeof command, "addr2line -s -e '%s' %#lx", info.dli_fname, offset);
    if (FILE *output = popen(command, "r")) {
        if (!fgets(line, sizeof line, output))
            line[0] = 0;
        pclose(output);
    }
    std::string text = line;
    return text.substr(0, text.find_first_of(" \n"));
}

[[noreturn]] void report(const Access &before, bool wrote, uintptr_t address, bool writes, uintptr_t code) {
    uintptr_t earlier = (code & ~uintptr_t(0xffffffff)) | before.code;
    std::string who = before.block == block ? "thread " + std::to_string(before.thread) + " of its block"
                                            : "thread " + std::to_string(before.thread) + " of another block";
    emulated_fail(LAUNCH_FAILED, "a race: %s %s memory at %s, which %s %s at %s, and nothing orders the two",
                  writes ? "writes" : "reads", is_shared(address) ? "shared" : "global", place(code).c_str(),
                  who.c_str(), wrote ? "writes" : "reads", place(earlier).c_str());
}

Page &page_of(uintptr_t address) {
    if (known_page && known_number == address / PAGE && known_page->launch == first_block)
        return *known_page;
    auto &entry = pages[known_number = address / PAGE];
    if (!entry)
        entry = std::make_unique<Page>();
    Page *page = known_page = entry.get();
    if (page->launch != first_block) {
        void *start;
        size_t size;
        page->launch = first_block;
        page->device = memory::find(reinterpret_cast<void *>(address), start, size);
    }
    return *page;
}

void read_by(Byte &byte, const Access &now, unsigned me, uintptr_t address) {
    Access &first = byte.reads[0], &second = byte.reads[1];
    if (first.thread == me || ordered(first, me, address))
        first = now;
    else if (second.thread == me || ordered(second, me, address) || second.thread / 32 == first.thread / 32)
        second = now;
}

__attribute__((noinline)) void access(uintptr_t address, size_t size, bool writes, bool atomic, uintptr_t code) {
    if (!in_kernel() || on_stack(address))
        return;
    unsigned me = current_thread();
    Access now;
    now.block = block, now.epoch = epoch, now.code = static_cast<uint32_t>(code), now.clock = threads[me].clock;
    now.thread = me, now.atomic = atomic;
    for (uintptr_t at = address; at < address + size; at++) {
        Page &page = page_of(at);
        if (!page.device && !is_shared(at))
            continue; // the emulator's own: whether a static variable was constructed, say
        Byte &byte = page.bytes[at % PAGE];
        auto races_with = [&](const Access &before) {
            return !(before.atomic && atomic) && !ordered(before, me, at);
        };
        if (races_with(byte.write))
            report(byte.write, true, at, writes, code);
        for (Access &read : byte.reads)
            if (writes && races_with(read))
                report(read, read.atomic, at, true, code);
        if (writes) {
            byte.write = now;
            if (!atomic)
                byte.reads[0] = byte.reads[1] = Access{};
        }
        if (!writes || atomic) // which reads too, and `write` is only the last of those that are not in order
            read_by(byte, now, me, at);
    }
}

} // namespace

bool looked_for() {
    static const bool yes = getenv("EMULATED_GPU_RACES") && *getenv("EMULATED_GPU_RACES") == '1';
    return yes;
}

void begin_launch(const void *dynamic_shared, size_t size) {
    if (!looked_for())
        return;
    if (pages.size() > MOST_PAGES)
        pages.clear(), known_page = nullptr;
    shared.assign(1, {reinterpret_cast<uintptr_t>(dynamic_shared), size});
    first_block = block + 1;
}

void begin_block() {
    if (!looked_for())
        return;
    block++;
    epoch = 0;
    threads.assign(1024, Thread{1, {}});
}

void barrier() { epoch++; }

void arrive(Clocks &met) {
    Thread &thread = threads[current_thread()];
    thread.seen[current_thread() % 32] = thread.clock++;
    for (unsigned lane = 0; lane < 32; lane++)
        met[lane] = std::max(met[lane], thread.seen[lane]);
}

void leave(const Clocks &met) {
    Clocks &seen = threads[current_thread()].seen;
    for (unsigned lane = 0; lane < 32; lane++)
        seen[lane] = std::max(seen[lane], met[lane]);
}

void add_shared(const void *start, size_t size) {
    Range range{reinterpret_cast<uintptr_t>(start), size};
    if (looked_for() && !is_shared(range.start))
        shared.push_back(range);
}

// What g++ calls.
#define CODE reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define ACCESSES(SIZE)                                                                                                 \
    void __tsan_read##SIZE(uintptr_t address) { access(address, SIZE, false, false, CODE); }                           \
    void __tsan_write##SIZE(uintptr_t address) { access(address, SIZE, true, false, CODE); }                           \
    void __tsan_unaligned_read##SIZE(uintptr_t address) { access(address, SIZE, false, false, CODE); }                 \
    void __tsan_unaligned_write##SIZE(uintptr_t address) { access(address, SIZE, true, false, CODE); }

extern "C" {
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(uintptr_t address, size_t size) { access(address, size, false, false, CODE); }
void __tsan_write_range(uintptr_t address, size_t size) { access(address, size, true, false, CODE); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

void emulated_atomic(const void *address, unsigned long size) {
    if (looked_for())
        access(reinterpret_cast<uintptr_t>(address), size, true, true, CODE);
}
}

} // namespace emulated::races
