// Many tensors in one launch, each between dtypes of its own; contiguous. A block has a chunk of one.

struct Row { u64 first_block, len, to, from, kinds; };

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

KERNEL cast_many(const __grid_constant__ Table<Row> table) {
    const Row &row = table.rows[table.row()];
    size_t start = start_of(row), n = end_of(row) - start;
    switch (row.kinds & 15) {
        case 0: return chunk_from<float>(row, start, n);
        case 1: return chunk_from<f16>(row, start, n);
        case 2: return chunk_from<bf16>(row, start, n);
        default: return chunk_from<double>(row, start, n);
    }
}
