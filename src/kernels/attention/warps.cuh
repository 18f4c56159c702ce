// Products of one warp, by `mma.sync`: its 16 rows times the rows of a tile in shared memory. For compute capability
// 8.0 and later; on Hopper for F32 only.
//
// The warp's rows are the left operand. Forward keeps them in registers. Backward needs more, so it multiplies 16 rows
// of a tile at a time, and keeps the wide rows of F32 in shared memory.
//
// `mma.sync` takes the right operand by columns. Rows times a transposed tile therefore read the tile as it is, and
// weights times a tile read it transposed. `ldmatrix` does both for 16-bit numbers, ordinary loads for F32.
//
// `cp.async` fills one stage of tiles while products read the other; both stages take 36 KiB of shared memory at most.
// Rows are padded by 8 elements, so that the rows which are read together start in different banks.

// Four matrices of 8 x 8 16-bit numbers out of shared memory, a register each. Lane i says where row i % 8 of matrix
// i / 8 is. Lane 4 g + t gets the elements 2 t and 2 t + 1 of row g, or of column g where TURNED.
template <bool TURNED> DEVICE void load_matrices(u32 (&to)[4], const void *row) {
    u32 at = (u32)__cvta_generic_to_shared(row);
#define LOAD(turned)                                                                              \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" turned ".shared.b16 {%0, %1, %2, %3}, [%4];"     \
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                             \
                 : "r"(at)                                                                        \
                 : "memory")
    if constexpr (TURNED) {
        LOAD(".trans");
    } else {
        LOAD("");
    }
}

// Rows of a tile: of two tiles in two stages, one that is read and one on its way, there is room for as many.
template <int D, class T> constexpr int TILE = 8192 / sizeof(T) / D;

// The rows of a tile begin to come, of `width` elements, zeros where there are none. A row has 8 more than D,
// so that eight rows start in different banks, or four of F32.
template <int D, class T>
DEVICE void fetch_rows(T (*to)[D + 8], const T *from, size_t stride, size_t first, size_t rows, size_t width) {
    constexpr int PACK = 16 / sizeof(T), APART = 128 * PACK / D; // rows, from one pack of a thread to the next
    constexpr int ROWS = TILE<D, T>;
    int row = threadIdx.x / (D / PACK), column = threadIdx.x % (D / PACK) * PACK;
    int there = column >= width ? 0 : rows - first < ROWS ? (int)(rows - first) : ROWS;
    from += (first + row) * stride + column;
#pragma unroll
    for (int i = 0; i < ROWS; i += APART) {
        copy_async<16>(&to[row + i][column], from + i * stride, row + i < there);
    }
}

// The left operand of a product in shared memory, if registers are short: each lane reads its own part there.
template <int D> struct KeptLeft {
    uint4 (*at)[128];

    template <class T> DEVICE KeptLeft(uint4 (*at)[128], const Left<D, T> &left) : at(at) {
#pragma unroll
        for (int step = 0; step < D / 8; step++) {
            const u32(&part)[4] = left.at[step];
            at[step][threadIdx.x] = make_uint4(part[0], part[1], part[2], part[3]);
        }
    }
};

// c (16, 8) += left (16, D) times eight rows of a tile, transposed.
template <int D, class T>
DEVICE void times_turned(float (&c)[4], const Left<D, T> &left, const T (*tile)[D + 8], int first) {
    int lane = threadIdx.x % 32;
    if constexpr (IS_WIDE<T>) {
#pragma unroll
        for (int step = 0; step < D / 8; step++) {
            uint2 right = *(const uint2 *)&tile[first + lane / 4][step * 8 + lane % 4 * 2];
            multiply_to_nearest<T>(c, left.at[step], right.x, right.y);
        }
    } else {
#pragma unroll
        for (int step = 0; step < D / 16; step += 2) {
            u32 right[4];
            load_matrices<false>(right, &tile[first + lane % 8][step * 16 + lane / 8 * 8]);
            multiply<T>(c, left.at[step], right[0], right[1]);
            multiply<T>(c, left.at[step + 1], right[2], right[3]);
        }
    }
}

// The same, of what lies in shared memory. Not unrolled more: what is read ahead would spill.
template <int D, class T>
DEVICE void times_turned(float (&c)[4], const KeptLeft<D> &left, const T (*tile)[D + 8], int first) {
    int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int step = 0; step < D / 8; step++) {
        uint4 own = left.at[step][threadIdx.x];
        uint2 right = *(const uint2 *)&tile[first + lane / 4][step * 8 + lane % 4 * 2];
        multiply_to_nearest<T>(c, {own.x, own.y, own.z, own.w}, right.x, right.y);
    }
}

// c (16, D) += weights (16, 16) times sixteen rows of a tile.
template <int D, class T>
DEVICE void times(float (&c)[D / 8][4], const Left<16, T> &weights, const T (*tile)[D + 8], int first) {
    int lane = threadIdx.x % 32;
    if constexpr (IS_WIDE<T>) {
        const T(*rows)[D + 8] = tile + first + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            // By itself first, as in `multiply_to_nearest`, but 16 rows at once.
            float sum[4] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 *b0 = (const u32 *)&rows[half * 8][n * 8 + lane / 4];
                const u32 *b1 = (const u32 *)&rows[half * 8 + 1][n * 8 + lane / 4];
                multiply<T>(sum, weights.at[half], *b0, *b1);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) c[n][e] += sum[e];
        }
    } else {
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            u32 right[4];
            load_matrices<true>(right, &tile[first + lane % 16][(n + lane / 16) * 8]);
            multiply<T>(c[n], weights.at[0], right[0], right[1]);
            multiply<T>(c[n + 1], weights.at[0], right[2], right[3]);
        }
    }
}

// How a block of four warps multiplies: each by itself.
template <int D, class T> struct OfWarps {
    // Rows of a block and of a tile, and those of a tile that backward multiplies at once, as there are registers for.
    static constexpr int ROWS = 64, TILE_ROWS = TILE<D, T>, AT_ONCE = 16;
    typedef T Rows[TILE_ROWS][D + 8];
    struct Tiles {
        Rows first[2], second[2];
    };

    DEVICE static Tiles &tiles() {
        __shared__ __align__(16) Tiles all;
        return all;
    }

    // The rows of a block, where products take them from in backward. They stay in registers; but the wide ones of F32 in
    // one of two places of shared memory.
    DEVICE static decltype(auto) keep(int which, const Left<D, T> &left) {
        if constexpr (IS_WIDE<T> && D > 64) {
            extern __shared__ __align__(16) unsigned char kept_rows[];
            return KeptLeft<D>((uint4 (*)[128])kept_rows + which * (D / 8), left);
        } else {
            return (left); // a reference
        }
    }

    // The same in forward, which has registers for them.
    DEVICE static const Left<D, T> &keep_for_scores(const Left<D, T> &left) { return left; }

    DEVICE static void fetch(Rows &to, const T *from, size_t stride, size_t first, size_t rows, size_t width) {
        fetch_rows<D>(to, from, stride, first, rows, width);
    }

    DEVICE static void wait_for_tile() {
        arrived();
        __syncthreads();
    }

    // p = left keys^T
    DEVICE static void scores(float (&p)[TILE_ROWS / 8][4], const Left<D, T> &left, const Rows &keys) {
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++) times_turned<D>(p[n], left, keys, n * 8);
    }

    // p = left rows^T, and dp alike, of `AT_ONCE` rows of tiles.
    template <class L>
    DEVICE static void both(float (&p)[AT_ONCE / 8][4], const L &left, const Rows &rows, float (&dp)[AT_ONCE / 8][4],
                            const L &other, const Rows &other_rows, int from) {
#pragma unroll
        for (int n = 0; n < AT_ONCE / 8; n++) {
            times_turned<D>(p[n], left, rows, from + n * 8);
            times_turned<D>(dp[n], other, other_rows, from + n * 8);
        }
    }

    // result += weights rows, from a row on.
    template <int N>
    DEVICE static void add(float (&result)[D / 8][4], const Left<16, T> (&weights)[N], const Rows &rows, int from) {
#pragma unroll
        for (int step = 0; step < N; step++) times<D>(result, weights[step], rows, from + step * 16);
    }
};
