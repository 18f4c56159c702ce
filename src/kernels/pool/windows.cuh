// Windows over planes of (h, w).

// What every kernel is told about its windows; a block of 32-bit numbers where they are enough, as
// division by 64-bit ones is slow.
template <class I> struct Window {
    I h, w, oh, ow, kh, kw, sh, sw, ph, pw;
};

// The part of an axis that a window covers: padding left out.
template <class I> struct Span {
    I from, to;

    DEVICE Span(I window, I kernel, I stride, I padding, I size) {
        I start = window * stride, end = start + kernel;
        from = start > padding ? start - padding : 0;
        to = end > padding ? end - padding : 0;
        if (to > size) to = size;
    }
};

// The windows that cover a place of an axis.
template <class I> struct Cover {
    I from, to;

    DEVICE Cover(I place, I kernel, I stride, I padding, I windows) {
        I padded = place + padding;
        from = padded >= kernel ? (padded - kernel) / stride + 1 : 0;
        to = padded / stride + 1;
        if (to > windows) to = windows;
    }
};

#define WINDOW                                                                                     \
    size_t planes, size_t h, size_t w, size_t oh, size_t ow, size_t kh, size_t kw, size_t sh,      \
        size_t sw, size_t ph, size_t pw
#define OF(I) Window<I>{(I)h, (I)w, (I)oh, (I)ow, (I)kh, (I)kw, (I)sh, (I)sw, (I)ph, (I)pw}

// `body` for each of `count` elements `i`. Nothing in it, padded places included, is more than all
// elements of both sides and the padding together.
#define FOR_EACH(count, body)                                                                      \
    if ((double)planes * (h + 2 * ph + kh) * (w + 2 * pw + kw) < 2147483648.0 && planes * oh * ow < 1ull << 31) { \
        typedef u32 I;                                                                             \
        for (I i = (I)global_thread(); i < (I)(count); i += (I)global_threads()) body;             \
    } else {                                                                                       \
        typedef size_t I;                                                                          \
        for (I i = global_thread(); i < (count); i += global_threads()) body;                      \
    }

