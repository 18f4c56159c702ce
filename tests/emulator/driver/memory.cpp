// The device's memory: each allocation between pages that cannot be touched.
#include "memory.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <sys/mman.h>

#include "driver.hpp"

namespace emulated {
namespace {

constexpr size_t PAGE = 4096;
// Around what is allocated, where a page guards nothing.
constexpr unsigned char CANARY = 0xcb;
// How many freed allocations stay out of reach before their addresses are used again.
constexpr size_t QUARANTINE = 2048;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Under address sanitizer, which guards what malloc returns better than pages can.
bool sanitized() {
    static const bool yes = getenv("EMULATED_GPU_ASAN") && *getenv("EMULATED_GPU_ASAN") == '1';
    return yes;
}

} // namespace

Guarded::Guarded(size_t size, size_t alignment, size_t window) : size(size) {
    if (sanitized()) {
        length = 0;
        void *memory = nullptr;
        if (posix_memalign(&memory, std::max<size_t>(256, window), size ? size : 1))
            throw std::bad_alloc();
        start = pages = static_cast<unsigned char *>(memory);
        memset(start, GARBAGE, size);
        return;
    }
    size_t inner = round_up(round_up(size, alignment), PAGE);
    length = inner + 2 * PAGE;
    void *all = mmap(nullptr, length + window, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pages = static_cast<unsigned char *>(all);
    if (size_t first = reinterpret_cast<size_t>(pages) + PAGE; window && first % window + inner > window)
        pages += round_up(first, window) - first;
    if (all == MAP_FAILED || mprotect(pages + PAGE, inner, PROT_READ | PROT_WRITE)) {
        perror("emulated GPU: device memory");
        throw std::bad_alloc();
    }
    if (size_t before = pages - static_cast<unsigned char *>(all); window) {
        if (before)
            munmap(all, before);
        if (before < window)
            munmap(pages + length, window - before);
    }
    start = pages + PAGE + inner - round_up(size, alignment);
    if (!idle()) // nobody reads it then
        accessible(true);
}

Guarded::~Guarded() {
    if (length)
        munmap(pages, length);
    else
        free(pages);
}

bool Guarded::intact() const {
    if (!length || !open)
        return true;
    for (const unsigned char *byte = pages + PAGE; byte < start; byte++)
        if (*byte != CANARY)
            return false;
    for (const unsigned char *byte = start + size; byte < pages + length - PAGE; byte++)
        if (*byte != CANARY)
            return false;
    return true;
}

void Guarded::accessible(bool yes) {
    if (length && open != yes) {
        open = yes;
        size_t inner = length - 2 * PAGE;
        if (!yes)
            madvise(pages + PAGE, inner, MADV_DONTNEED);
        mprotect(pages + PAGE, inner, yes ? PROT_READ | PROT_WRITE : PROT_NONE);
        if (yes) {
            memset(pages + PAGE, CANARY, start - pages - PAGE);
            memset(start + size, CANARY, pages + length - PAGE - start - size);
        }
    }
    if (yes)
        memset(start, GARBAGE, size);
}

bool Guarded::contains(const void *pointer) const { return pointer >= start && pointer < start + size; }

namespace memory {
namespace {

// Never destroyed: threads may still free memory while the process exits.
auto &lock = *new std::mutex;
auto &live = *new std::map<uintptr_t, std::unique_ptr<Guarded>>;
auto &freed = *new std::deque<std::unique_ptr<Guarded>>;
// What an idle device has freed, by size: as fast as a pool.
auto &spare = *new std::map<size_t, std::vector<std::unique_ptr<Guarded>>>;
auto &variables = *new std::map<uintptr_t, size_t>;
size_t bytes = 0, most = 0;
size_t pool = 0, most_pool = 0, kept = 0;

bool limited() {
    static const bool yes = getenv("EMULATED_GPU_MEMORY");
    return yes;
}

// With `lock` held: the last allocation that starts at or before `pointer`.
Guarded *before(const void *pointer) {
    auto next = live.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    return next == live.begin() ? nullptr : std::prev(next)->second.get();
}

} // namespace

void *allocate(size_t size) {
    std::lock_guard guard(lock);
    // What the machine has is less than what the device says: fail rather than be killed.
    if ((limited() ? pool : bytes) + size > total() || size > size_t(8) << 30)
        return nullptr;
    const char *alignment = getenv("EMULATED_GPU_ALIGNMENT");
    std::unique_ptr<Guarded> allocation;
    if (idle() && !spare[size].empty()) {
        allocation = std::move(spare[size].back());
        spare[size].pop_back();
    } else {
        allocation = std::make_unique<Guarded>(size, alignment ? atoi(alignment) : 16);
    }
    void *start = allocation->start;
    bytes += size;
    most = std::max(most, bytes);
    pool = limited() ? pool + size : std::max(pool, bytes);
    most_pool = std::max(most_pool, pool);
    live[reinterpret_cast<uintptr_t>(start)] = std::move(allocation);
    return start;
}

Freed release(void *start) {
    std::lock_guard guard(lock);
    auto found = live.find(reinterpret_cast<uintptr_t>(start));
    if (found == live.end())
        return Freed::unknown;
    auto allocation = std::move(found->second);
    live.erase(found);
    bytes -= allocation->size;
    if (idle()) {
        spare[allocation->size].push_back(std::move(allocation));
        return Freed::well;
    }
    bool intact = allocation->intact();
    if (!sanitized()) { // which has a quarantine of its own
        allocation->accessible(false);
        freed.push_back(std::move(allocation));
        if (freed.size() > QUARANTINE)
            freed.pop_front();
    }
    return intact ? Freed::well : Freed::overrun;
}

bool accessible(void *start, bool yes) {
    std::lock_guard guard(lock);
    auto found = live.find(reinterpret_cast<uintptr_t>(start));
    if (found != live.end())
        found->second->accessible(yes);
    return found != live.end();
}

bool valid(const void *start, size_t size) {
    std::lock_guard guard(lock);
    const Guarded *allocation = before(start);
    auto from = static_cast<const unsigned char *>(start);
    if (allocation && from + size <= allocation->start + allocation->size)
        return true;
    auto next = variables.upper_bound(reinterpret_cast<uintptr_t>(start));
    return next != variables.begin() &&
           reinterpret_cast<uintptr_t>(start) + size <= std::prev(next)->first + std::prev(next)->second;
}

void add_variable(void *start, size_t size) {
    std::lock_guard guard(lock);
    variables[reinterpret_cast<uintptr_t>(start)] = size;
}

void remove_variable(void *start) {
    std::lock_guard guard(lock);
    variables.erase(reinterpret_cast<uintptr_t>(start));
}

bool find(const void *pointer, void *&start, size_t &size) {
    std::lock_guard guard(lock);
    const Guarded *allocation = before(pointer);
    if (!allocation || !allocation->contains(pointer))
        return false;
    start = allocation->start;
    size = allocation->size;
    return true;
}

size_t in_use() {
    std::lock_guard guard(lock);
    return bytes;
}
size_t peak() {
    std::lock_guard guard(lock);
    return most;
}
void forget_peak() {
    std::lock_guard guard(lock);
    most = bytes;
}
size_t reserved() {
    std::lock_guard guard(lock);
    return pool;
}
size_t peak_reserved() {
    std::lock_guard guard(lock);
    return most_pool;
}
void forget_peak_reserved() {
    std::lock_guard guard(lock);
    most_pool = pool;
}
void keep(size_t threshold) {
    std::lock_guard guard(lock);
    kept = threshold;
}
void trim(size_t threshold) {
    std::lock_guard guard(lock);
    pool = std::max(bytes, std::min(pool, threshold));
}
void synchronised() { trim(kept); }
size_t total() {
    static const char *bytes = getenv("EMULATED_GPU_MEMORY");
    return bytes ? strtoull(bytes, nullptr, 0) : size_t(139) << 30;
}

std::string describe(const void *pointer) {
    std::lock_guard guard(lock);
    auto at = static_cast<const unsigned char *>(pointer);
    for (const auto &allocation : freed)
        if (allocation->contains(at))
            return "in an allocation of " + std::to_string(allocation->size) + " bytes that has been freed";
    constexpr ptrdiff_t NEAR = 1 << 20;
    Guarded *last = before(pointer);
    if (last && at - (last->start + last->size) < NEAR)
        return std::to_string(at - (last->start + last->size)) + " bytes after the end of an allocation of " +
               std::to_string(last->size) + " bytes";
    auto next = live.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (next != live.end() && next->second->start - at < NEAR)
        return std::to_string(next->second->start - at) + " bytes before an allocation of " +
               std::to_string(next->second->size) + " bytes";
    return "in no allocation";
}

} // namespace memory
} // namespace emulated
