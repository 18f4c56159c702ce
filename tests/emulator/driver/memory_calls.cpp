// The driver's functions for memory.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "driver.hpp"

namespace emulated {
namespace {

using Pointer = unsigned long long;

void *address(Pointer pointer) { return reinterpret_cast<void *>(pointer); }

std::mutex host_lock;
// Never destroyed: a thread may outlive `main`.
auto &pinned = *new std::map<char *, size_t>;

bool is_pinned(const void *pointer) {
    std::lock_guard guard(host_lock);
    auto at = static_cast<const char *>(pointer);
    auto next = pinned.upper_bound(const_cast<char *>(at));
    return next != pinned.begin() && at < std::prev(next)->first + std::prev(next)->second;
}

// Whether all of what a call names is allocated.
bool reaches(const char *name, Pointer start, size_t size, int &error) {
    if (memory::valid(address(start), size) || size == 0)
        return true;
    error = complain(INVALID_VALUE, "%s of %zu bytes at %#llx, %s", name, size, start,
                     memory::describe(reinterpret_cast<char *>(start) + size - 1).c_str());
    return false;
}

int copy(const char *name, Pointer to, Pointer from, size_t size, void *stream) {
    int error;
    if (!reaches(name, to, size, error) || !reaches(name, from, size, error))
        return error;
    return submit(stream, name, [=] {
        memmove(address(to), address(from), size);
        return SUCCESS;
    });
}

int upload(const char *name, Pointer to, const void *from, size_t size, void *stream) {
    int error;
    if (!reaches(name, to, size, error))
        return error;
    if (capturing(stream) && !is_pinned(from))
        complain(SUCCESS, "%s is captured with pageable memory, which each launch of the graph reads anew", name);
    // Pageable memory is read before the call returns.
    std::shared_ptr<std::vector<char>> staged;
    if (behind(stream) && !capturing(stream) && !is_pinned(from))
        staged = std::make_shared<std::vector<char>>(static_cast<const char *>(from), static_cast<const char *>(from) + size);
    return submit(stream, name, [=] {
        memcpy(address(to), staged ? staged->data() : from, size);
        return SUCCESS;
    }, true);
}

int download(const char *name, void *to, Pointer from, size_t size, void *stream) {
    int error;
    if (!reaches(name, from, size, error))
        return error;
    if (capturing(stream) && !is_pinned(to))
        return not_while_capturing(name);
    error = submit(stream, name, [=] {
        memcpy(to, address(from), size);
        return SUCCESS;
    }, true);
    // Into pageable memory the call returns when all is there.
    if (error || capturing(stream) || is_pinned(to))
        return error;
    error = finish(stream);
    memory::synchronised();
    return error;
}

template <class T> int fill(const char *name, Pointer to, T value, size_t count, void *stream) {
    int error;
    if (to % sizeof(T))
        return INVALID_VALUE;
    if (!reaches(name, to, count * sizeof(T), error))
        return error;
    return submit(stream, name, [=] {
        std::fill_n(static_cast<T *>(address(to)), count, value);
        return SUCCESS;
    });
}

int release(const char *name, Pointer pointer) {
    if (!pointer)
        return SUCCESS;
    int error;
    if (release_of_graph(address(pointer), error))
        return error;
    switch (memory::release(address(pointer))) {
    case memory::Freed::well:
        return SUCCESS;
    case memory::Freed::unknown:
        return complain(INVALID_VALUE, "%s of %#llx, which is not allocated", name, pointer);
    case memory::Freed::overrun:
        // On a GPU nobody would notice. Here it is an error, which the next call returns.
        return sticky = complain(ILLEGAL_ADDRESS, "%s: something wrote beyond the memory at %#llx", name, pointer);
    }
    return SUCCESS;
}

int pool; // its address is the memory pool
constexpr int RELEASE_THRESHOLD = 4, RESERVED_MEM_CURRENT = 5, RESERVED_MEM_HIGH = 6, USED_MEM_CURRENT = 7,
              USED_MEM_HIGH = 8;
std::map<int, unsigned long long> pool_attributes;

} // namespace

#define UNSAFE(name)                                                                                                   \
    CHECK_STICKY();                                                                                                    \
    if (int error = not_while_capturing(#name))                                                                        \
    return error

extern "C" {

int cuMemAlloc_v2(Pointer *pointer, size_t size) {
    UNSAFE(cuMemAlloc);
    if (!size)
        return INVALID_VALUE;
    *pointer = reinterpret_cast<Pointer>(memory::allocate(size));
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemAllocAsync(Pointer *pointer, size_t size, void *stream) {
    CHECK_STICKY();
    if (!size)
        return INVALID_VALUE;
    void *start;
    if (capturing(stream)) {
        int error = allocate_in_capture(stream, size, &start);
        *pointer = reinterpret_cast<Pointer>(start);
        return error;
    }
    *pointer = reinterpret_cast<Pointer>(memory::allocate(size));
    return *pointer ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemAllocFromPoolAsync(Pointer *pointer, size_t size, void *, void *stream) {
    return cuMemAllocAsync(pointer, size, stream);
}
int cuMemAllocManaged(Pointer *pointer, size_t size, unsigned) { return cuMemAlloc_v2(pointer, size); }
int cuMemFree_v2(Pointer pointer) {
    UNSAFE(cuMemFree);
    if (int error = finish_all())
        return error;
    return release("cuMemFree", pointer);
}
int cuMemFreeAsync(Pointer pointer, void *stream) {
    CHECK_STICKY();
    if (capturing(stream))
        return release_in_capture(stream, address(pointer));
    if (!behind(stream))
        return release("cuMemFreeAsync", pointer);
    return submit(stream, "cuMemFreeAsync", [=] { return release("cuMemFreeAsync", pointer); }, true);
}
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = memory::total();
    *free = memory::total() - memory::in_use();
    return SUCCESS;
}
int cuMemGetAddressRange_v2(Pointer *base, size_t *size, Pointer pointer) {
    void *start;
    size_t length;
    if (!memory::find(address(pointer), start, length))
        return NOT_FOUND;
    if (base)
        *base = reinterpret_cast<Pointer>(start);
    if (size)
        *size = length;
    return SUCCESS;
}
int cuPointerGetAttribute(void *data, int attribute, Pointer pointer) {
    void *start;
    size_t length;
    bool device = memory::find(address(pointer), start, length);
    if (!device && !is_pinned(address(pointer)))
        return INVALID_VALUE;
    if (attribute == 2) // its kind: the host's or the device's
        *static_cast<unsigned *>(data) = device ? 2 : 1;
    else if (attribute == 3) // as a device pointer
        *static_cast<Pointer *>(data) = pointer;
    else if (attribute == 9) // the device's ordinal
        *static_cast<int *>(data) = 0;
    else
        return complain(NOT_SUPPORTED, "cuPointerGetAttribute of attribute %d", attribute);
    return SUCCESS;
}

int cuMemHostAlloc(void **pointer, size_t size, unsigned) {
    UNSAFE(cuMemHostAlloc);
    if (posix_memalign(pointer, 4096, size ? size : 1))
        return OUT_OF_MEMORY;
    std::lock_guard guard(host_lock);
    pinned[static_cast<char *>(*pointer)] = size;
    return SUCCESS;
}
int cuMemAllocHost_v2(void **pointer, size_t size) { return cuMemHostAlloc(pointer, size, 0); }
int cuMemFreeHost(void *pointer) {
    UNSAFE(cuMemFreeHost);
    std::lock_guard guard(host_lock);
    if (!pinned.erase(static_cast<char *>(pointer)))
        return INVALID_VALUE;
    free(pointer);
    return SUCCESS;
}
int cuMemHostRegister_v2(void *pointer, size_t size, unsigned) {
    std::lock_guard guard(host_lock);
    pinned[static_cast<char *>(pointer)] = size;
    return SUCCESS;
}
int cuMemHostUnregister(void *pointer) {
    std::lock_guard guard(host_lock);
    return pinned.erase(static_cast<char *>(pointer)) ? SUCCESS : INVALID_VALUE;
}
int cuMemHostGetDevicePointer_v2(Pointer *pointer, void *host, unsigned) {
    *pointer = reinterpret_cast<Pointer>(host);
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t size, void *stream) {
    return upload("cuMemcpyHtoDAsync", to, from, size, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t size, void *stream) {
    return download("cuMemcpyDtoHAsync", to, from, size, stream);
}
int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t size, void *stream) {
    return copy("cuMemcpyDtoDAsync", to, from, size, stream);
}
int cuMemcpyPeerAsync(Pointer to, void *, Pointer from, void *, size_t size, void *stream) {
    return copy("cuMemcpyPeerAsync", to, from, size, stream);
}
int cuMemcpyHtoD_v2(Pointer to, const void *from, size_t size) {
    UNSAFE(cuMemcpyHtoD);
    return upload("cuMemcpyHtoD", to, from, size, nullptr);
}
int cuMemcpyDtoH_v2(void *to, Pointer from, size_t size) {
    UNSAFE(cuMemcpyDtoH);
    return download("cuMemcpyDtoH", to, from, size, nullptr);
}
int cuMemcpyDtoD_v2(Pointer to, Pointer from, size_t size) {
    UNSAFE(cuMemcpyDtoD);
    return copy("cuMemcpyDtoD", to, from, size, nullptr);
}
int cuMemsetD8Async(Pointer to, unsigned char value, size_t count, void *stream) {
    return fill("cuMemsetD8Async", to, value, count, stream);
}
int cuMemsetD16Async(Pointer to, unsigned short value, size_t count, void *stream) {
    return fill("cuMemsetD16Async", to, value, count, stream);
}
int cuMemsetD32Async(Pointer to, unsigned value, size_t count, void *stream) {
    return fill("cuMemsetD32Async", to, value, count, stream);
}
int cuMemsetD8_v2(Pointer to, unsigned char value, size_t count) {
    UNSAFE(cuMemsetD8);
    return fill("cuMemsetD8", to, value, count, nullptr);
}
int cuMemsetD16_v2(Pointer to, unsigned short value, size_t count) {
    UNSAFE(cuMemsetD16);
    return fill("cuMemsetD16", to, value, count, nullptr);
}
int cuMemsetD32_v2(Pointer to, unsigned value, size_t count) {
    UNSAFE(cuMemsetD32);
    return fill("cuMemsetD32", to, value, count, nullptr);
}

int cuMemAdvise_v2() { return SUCCESS; }
int cuMemPrefetchAsync_v2() { return SUCCESS; }
int cuDeviceGetDefaultMemPool(void **result, int) {
    *result = &pool;
    return SUCCESS;
}
int cuDeviceGetMemPool(void **result, int) {
    *result = &pool;
    return SUCCESS;
}
int cuDeviceSetMemPool(int, void *) { return SUCCESS; }
// A pool hands out all anew; what it says to have reserved is what a real one would, at the least.
int cuMemPoolSetAttribute(void *, int attribute, void *value) {
    auto number = *static_cast<unsigned long long *>(value);
    if (attribute == USED_MEM_HIGH || attribute == RESERVED_MEM_HIGH) {
        if (number)
            return INVALID_VALUE;
        attribute == USED_MEM_HIGH ? memory::forget_peak() : memory::forget_peak_reserved();
        return SUCCESS;
    }
    if (attribute == RELEASE_THRESHOLD)
        memory::keep(number);
    std::lock_guard guard(host_lock);
    pool_attributes[attribute] = number;
    return SUCCESS;
}
int cuMemPoolGetAttribute(void *, int attribute, void *value) {
    std::lock_guard guard(host_lock);
    auto &number = *static_cast<unsigned long long *>(value);
    switch (attribute) {
    case USED_MEM_CURRENT:
        number = memory::in_use();
        break;
    case USED_MEM_HIGH:
        number = memory::peak();
        break;
    case RESERVED_MEM_CURRENT:
        number = memory::reserved();
        break;
    case RESERVED_MEM_HIGH:
        number = memory::peak_reserved();
        break;
    default:
        number = pool_attributes[attribute];
    }
    return SUCCESS;
}
int cuMemPoolTrimTo(void *, size_t bytes) {
    memory::trim(bytes);
    return SUCCESS;
}
// The memory of graphs is counted with the pool's here.
int cuDeviceGetGraphMemAttribute(int, int, void *value) {
    *static_cast<unsigned long long *>(value) = 0;
    return SUCCESS;
}
int cuDeviceSetGraphMemAttribute(int, int, void *value) {
    return *static_cast<unsigned long long *>(value) ? INVALID_VALUE : SUCCESS;
}
int cuDeviceGraphMemTrim(int) { return SUCCESS; }
}

} // namespace emulated
