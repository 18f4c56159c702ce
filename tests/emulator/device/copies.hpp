// Copies to shared memory that a thread begins and later waits for, as `cp.async` and `cp.async.wait_all`. In between
// there is garbage: a thread that reads too soon gets that, and one that still reads what was there before races.
#pragma once

namespace emulated {

template <class Word> void begin_copy(Word *to, Word garbage, const void *from, bool reads) {
    *to = garbage;
    emulated_begin_copy({to, from, sizeof(Word), reads});
}

template <class Word> void finish_copy(const Copy &copy) {
    *static_cast<Word *>(copy.to) = copy.reads ? *static_cast<const Word *>(copy.from) : Word{};
}

} // namespace emulated

// 4 or 16 bytes; zeros, which nothing is read for, unless it `reads`.
inline void emulated_copy_async(void *to, const void *from, unsigned size, bool reads) {
    if (size == 16)
        emulated::begin_copy(static_cast<uint4 *>(to), make_uint4(~0u, ~0u, ~0u, ~0u), from, reads);
    else if (size == 4)
        emulated::begin_copy(static_cast<unsigned *>(to), ~0u, from, reads);
    else
        emulated::emulated_fail(emulated::LAUNCH_FAILED, "a copy of %u bytes, which is neither 4 nor 16", size);
}

inline void emulated_copies_arrived() {
    for (emulated::Copy copy; emulated::emulated_next_copy(&copy);)
        copy.size == 16 ? emulated::finish_copy<uint4>(copy) : emulated::finish_copy<unsigned>(copy);
}
