// Many tensors in one launch, each between dtypes of its own; contiguous. A block has a chunk of one.

struct Row { u64 first_block, len, to, from, kinds; };

static constexpr u64 WORDS = 4064;
static constexpr u64 ROWS = (WORDS - 1) / 5;

struct Table {
    u64 count;
    Row rows[ROWS];
    u64 rest[WORDS - 1 - 5 * ROWS];
};

static constexpr size_t CHUNK = 1 << 14;

template <class S, class D> DEVICE void chunk(const Row &row, size_t start, size_t n) {
    const S *x = (const S *)row.from + start;
    D *y = (D *)row.to + start;
    along<PACK<S, D>>(n, aligned(x) && aligned(y), threadIdx.x, blockDim.x, [&](size_t i, auto width) {
        Acc<S> wide[decltype(width)::value];
        read(x + i, wide);
        write(y + i, wide);
    });
}

template <class S> DEVICE void chunk_from(const Row &row, size_t start, size_t n) {
    switch (row.kinds >> 4) {
        case 0: return chunk<S, float>(row, start, n);
        case 1: return chunk<S, f16>(row, start, n);
        case 2: return chunk<S, bf16>(row, start, n);
        default: return chunk<S, double>(row, start, n);
    }
}

KERNEL cast_many(const __grid_constant__ Table table) {
    // The last row that starts at this block or before.
    u32 low = 0, high = (u32)table.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (table.rows[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    const Row &row = table.rows[low];
    size_t start = (blockIdx.x - row.first_block) * CHUNK;
    size_t n = row.len - start < CHUNK ? row.len - start : CHUNK;
    switch (row.kinds & 15) {
        case 0: return chunk_from<float>(row, start, n);
        case 1: return chunk_from<f16>(row, start, n);
        case 2: return chunk_from<bf16>(row, start, n);
        default: return chunk_from<double>(row, start, n);
    }
}
