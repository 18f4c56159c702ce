// Many tensors in one launch: a block has a chunk of one of them, and the table says of which.

enum : size_t { CHUNK = 1 << 14 }; // elements

// Rows begin with `first_block` and `len`.
template <class Row> struct Table {
    static constexpr u64 WORDS = 4064, ROWS = (WORDS - 1) / (sizeof(Row) / 8);
    u64 count;
    Row rows[ROWS];
    u64 rest[WORDS - 1 - ROWS * (sizeof(Row) / 8)];

    // The row whose blocks this one is among: the last that starts at it or before.
    DEVICE u32 row() const {
        u32 low = 0, high = (u32)count;
        while (high - low > 1) {
            u32 middle = (low + high) / 2;
            if (rows[middle].first_block <= blockIdx.x) low = middle;
            else high = middle;
        }
        return low;
    }
};

template <class Row> DEVICE size_t start_of(const Row &row) { return (blockIdx.x - row.first_block) * CHUNK; }

template <class Row> DEVICE size_t end_of(const Row &row) {
    size_t start = start_of(row);
    return row.len - start < CHUNK ? row.len : start + CHUNK;
}

// What a gradient is yet to be multiplied by, as in a row: the inverse of the scale, then what limits
// its norm. Null is for what the host knows, and for no limit.
struct Multiplier {
    const float *inverse_at;
    double inverse;
    const double *norm;
    double max_norm;
};

// Its factors. Each product is rounded.
template <class A> struct Factors {
    A inverse, clip;
    DEVICE Factors(const Multiplier &by) : inverse((A)(by.inverse_at ? *by.inverse_at : by.inverse)), clip(1) {
        double share = by.norm ? by.max_norm / (*by.norm + 1e-6) : 1.0;
        // Not `share < 1`: a NaN norm must reach the gradients.
        if (!(share >= 1.0)) clip = (A)share;
    }
    DEVICE A operator()(A x) const { return x * inverse * clip; }
};
