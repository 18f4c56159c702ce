#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

namespace emulated {

// Memory that ends at a page which cannot be touched, up to `alignment`, and begins after one.
class Guarded {
  public:
    // No multiple of `window`, if it is not 0, comes after its first byte: an address's lowest bits never begin anew.
    explicit Guarded(size_t size, size_t alignment = 16, size_t window = 0);
    ~Guarded();
    Guarded(const Guarded &) = delete;

    unsigned char *start;
    const size_t size;

    // Whether nothing was written into the bytes around it that no page could guard.
    bool intact() const;
    // From here on a touch of it is a fault (`false`), or allowed, with new garbage in it.
    void accessible(bool yes);
    bool contains(const void *pointer) const;

  private:
    unsigned char *pages;
    size_t length;
    bool open = false;
};

// The dynamic shared memory of a launch, of whose addresses descriptors of matrices have 18 bits.
struct DynamicShared : Guarded {
    explicit DynamicShared(size_t size) : Guarded(size, 16, 1 << 18) {}
};

namespace memory {

// Null where there is not that much.
void *allocate(size_t size);
// What was wrong, or nothing. Memory that is freed cannot be touched, for a while.
enum class Freed { well, unknown, overrun };
Freed release(void *start);
// For an allocation that a graph owns: freed and allocated anew by each of its runs.
bool accessible(void *start, bool yes);
// Whether all of it lies in one allocation.
bool valid(const void *start, size_t size);
// The allocation that a pointer is in: its start and size.
bool find(const void *pointer, void *&start, size_t &size);
// A module's own variables are memory of the device too.
void add_variable(void *start, size_t size);
void remove_variable(void *start);
size_t in_use();
// The most that was in use at once since the peak was forgotten.
size_t peak();
void forget_peak();
// What the pool has, and the most that it had: all that was allocated and not given back to the device.
size_t reserved();
size_t peak_reserved();
void forget_peak_reserved();
// What the pool keeps when somebody waits for the device.
void keep(size_t bytes);
void synchronised();
// Gives back what is not in use, but for so much.
void trim(size_t bytes);
// 139 GiB, or EMULATED_GPU_MEMORY bytes, of which the pool hands out nothing twice before it is trimmed: as if what it
// keeps never fitted.
size_t total();
// "12 bytes after the end of an allocation of 64 bytes", or that there is none nearby.
std::string describe(const void *pointer);

} // namespace memory
} // namespace emulated
