// From products of queries and keys to scores, as in scores.rs.

// What hides keys, or is added to their scores: of strides that broadcast it to (b, h, t, s).
struct Mask {
    const void *from;
    size_t s0, s1, s2, s3;
    int kind; // 0: none, 1: U8, where 0 hides, 2: added, in the type of the arithmetic

    DEVICE size_t row(size_t batch, size_t head, size_t query) const { return batch * s0 + head * s1 + query * s2; }
};

template <class A> struct Scores {
    A scale, cap; // a cap of 0 is none
    Mask mask;

    // The score of a product; `derivative` is that of the cap.
    DEVICE A of(A product, size_t mask_row, size_t key, A &derivative) const {
        A score = product * scale;
        derivative = A(1);
        if (cap != A(0)) {
            A t = tangent(product * (scale / cap));
            derivative = A(1) - t * t;
            score = t * cap;
        }
        size_t at = mask_row + key * mask.s3;
        if (mask.kind == 1 && !((const u8 *)mask.from)[at]) score = -infinity<A>();
        if (mask.kind == 2) score += ((const A *)mask.from)[at];
        return score;
    }
};
