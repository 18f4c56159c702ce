// Products of a Hopper warpgroup, by `wgmma`: four warps multiply 64 rows by a tile in shared memory. For 16-bit inputs
// on compute capability 9.0. PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// The instruction reads the tile from shared memory by a descriptor, so the tile takes no registers. Two or three
// warpgroups of a block share each tile, so fewer tiles come from the L2 cache. A block's own rows lie in shared memory
// too: queries in forward, those of both operands in backward. Rows have 128 bytes and the 128-byte swizzle: pack p of
// 16 bytes of row r is at p ^ r % 8. So eight packs of one column are in different banks, without padding.
//
// `wgmma` is asynchronous, and the compiler does not know when it accesses its registers. `begin_products` and
// `end_products` therefore enclose each chain of products and wait for its result, and `settle` pins the registers. The
// result is in the registers where `mma.sync` leaves it, so the kernels are written once for both.
#ifdef HOPPER

// Registers have their values here, and not only further on: the compiler knows of none that is read or written between
// a `wgmma` and the wait for it.
template <int N> DEVICE void settle(float (&c)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[n][e]) : : "memory");
    }
}

template <int N> DEVICE void settle(u32 (&a)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[n][e]) : : "memory");
    }
}

// Before the first product that reads or adds to registers which others have written.
template <class... C> DEVICE void begin_products(C &...registers) {
    (settle(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// The results are there.
template <class... C> DEVICE void end_products(C &...results) {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
    (settle(results), ...);
}

// Where a matrix is in shared memory whose rows are 128 bytes, swizzled, in blocks of eight. `columns` apart, in bytes, are
// 64 columns and the next 64 of one that is transposed. The matrix that is n bytes further is at this plus
// `further(n)`.
DEVICE u64 matrix_at(const void *first, u32 columns) {
    constexpr u64 EIGHT_ROWS = 1024, SWIZZLED_128 = 1;
    u64 address = (u32)__cvta_generic_to_shared(first) & 0x3ffff;
    return address >> 4 | (u64)(columns >> 4) << 16 | (EIGHT_ROWS >> 4) << 32 | SWIZZLED_128 << 62;
}
DEVICE constexpr u64 further(int bytes) { return bytes >> 4; }

#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define RESULTS_64                                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                         \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MULTIPLY_64(type)                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                     \
                 "{" RESULTS_64 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"                          \
                 : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right)                            \
                 : "memory")
#define MULTIPLY_128(type)                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                    \
                 "{" RESULTS_64 ", "                                                                 \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                            \
                 : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7),           \
                   FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right)                            \
                 : "memory")
#define MULTIPLY_SHARED_64(type)                                                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                     \
                 "{" RESULTS_64 "}, %32, %33, 1, 1, 1, 0, 0;"                                        \
                 : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)            \
                 : "l"(left), "l"(right)                                                             \
                 : "memory")

// Begins c (64, 8 N) += a (64, 16) b (16, 8 N). Columns of b follow one another in memory.
template <class T, int N> DEVICE void multiply_group(float (&c)[N][4], const u32 (&a)[4], u64 right) {
    static_assert(N == 8 || N == 16, "no such product");
    if constexpr (N == 16) {
        if constexpr (IS_F16<T>) {
            MULTIPLY_128("f16");
        } else {
            MULTIPLY_128("bf16");
        }
    } else if constexpr (IS_F16<T>) {
        MULTIPLY_64("f16");
    } else {
        MULTIPLY_64("bf16");
    }
}

// The same, of a in shared memory, too. Rows of both follow one another.
template <class T> DEVICE void multiply_group(float (&c)[8][4], u64 left, u64 right) {
    if constexpr (IS_F16<T>) {
        MULTIPLY_SHARED_64("f16");
    } else {
        MULTIPLY_SHARED_64("bf16");
    }
}

// How a block of two or three warpgroups, as many as there are registers for, multiplies: tiles of other rows are read
// by all of them, so that fewer of them come from the cache of the card.
template <int D, class T, int GROUPS> struct Groups {
    // Rows of a block and of a tile, all of which are multiplied at once.
    static constexpr int ROWS = 64 * GROUPS, TILE_ROWS = 64, AT_ONCE = TILE_ROWS;
    // Columns by 64. Packs of 16 bytes of a row are at other places in each of eight rows: eight of one column are in
    // different banks.
    template <int N> using Swizzled = T[D / 64][N][64];
    typedef Swizzled<TILE_ROWS> Rows;
    struct Tiles {
        Rows first[2], second[2];
    };
    // The block's own rows are there as well, for want of registers: in forward those of queries, in backward of two tensors.
    struct Memory {
        Tiles tiles;
        Swizzled<ROWS> own[2];
    };
    // The rows of a warpgroup in such a matrix.
    struct Own {
        const T *first;
    };

    // The swizzle is one of addresses: it begins anew at multiples of 1024 bytes.
    DEVICE static Memory &memory() {
        extern __shared__ unsigned char shared[];
        u32 beyond = (u32)__cvta_generic_to_shared(shared) % 1024;
        return *(Memory *)(shared + (1024 - beyond) % 1024);
    }

    DEVICE static Tiles &tiles() { return memory().tiles; }

    // The rows of a block, where products take them from: in one of two matrices, after `wait_for_tile`.
    DEVICE static Own keep(int which, const Left<D, T> &left) {
        auto &own = memory().own[which];
        int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int pack = 0; pack < D / 8; pack++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                T *to = &own[pack / 8][row + 8 * i][(pack % 8 ^ row % 8) * 8 + 2 * t];
                *(u32 *)to = left.at[pack / 2][i + pack % 2 * 2];
            }
        }
        return {&own[0][threadIdx.x / 128 * 64][0]};
    }

    DEVICE static Own keep_for_scores(const Left<D, T> &left) { return keep(0, left); }

    DEVICE static void fetch(Rows &to, const T *from, size_t stride, size_t first, size_t rows, size_t width) {
        constexpr int PACKS = D / 8, APART = 2 * ROWS / PACKS; // rows, from one pack of a thread to the next
        static_assert(APART % 8 == 0, "they are at the same place in eight rows");
        int row = threadIdx.x / PACKS, pack = threadIdx.x % PACKS;
        int there = pack * 8 >= width ? 0 : rows - first < TILE_ROWS ? (int)(rows - first) : TILE_ROWS;
        T *place = &to[pack / 8][row][(pack % 8 ^ row % 8) * 8];
        from += (first + row) * stride + pack * 8;
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i += APART) {
            if (row + i < TILE_ROWS) copy_async<16>(place + i * 64, from + i * stride, row + i < there);
        }
    }

    // What threads have copied, or kept, is there for tensor cores, too.
    DEVICE static void wait_for_tile() {
        arrived();
        asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
        __syncthreads();
    }

    // From the first 16 columns of a matrix of N rows to those of a step.
    template <int N> DEVICE static constexpr u64 columns(int step) { return further(step / 4 * N * 128 + step % 4 * 32); }

    // p = left keys^T
    DEVICE static void scores(float (&p)[TILE_ROWS / 8][4], Own left, const Rows &keys) {
        u64 at = matrix_at(left.first, 16), right = matrix_at(keys, 16);
        begin_products(p);
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            multiply_group<T>(p, at + columns<ROWS>(step), right + columns<TILE_ROWS>(step));
        }
        end_products(p);
    }

    // p = left rows^T, and dp alike.
    DEVICE static void both(float (&p)[AT_ONCE / 8][4], Own left, const Rows &rows, float (&dp)[AT_ONCE / 8][4],
                            Own other, const Rows &other_rows, int) {
        u64 at = matrix_at(left.first, 16), right = matrix_at(rows, 16);
        u64 other_at = matrix_at(other.first, 16), other_right = matrix_at(other_rows, 16);
        begin_products(p, dp);
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            multiply_group<T>(p, at + columns<ROWS>(step), right + columns<TILE_ROWS>(step));
        }
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            multiply_group<T>(dp, other_at + columns<ROWS>(step), other_right + columns<TILE_ROWS>(step));
        }
        end_products(p, dp);
    }

    // result += weights rows
    DEVICE static void add(float (&result)[D / 8][4], Left<16, T> (&weights)[TILE_ROWS / 16], const Rows &rows, int) {
        u64 right = matrix_at(rows, TILE_ROWS * 128);
#pragma unroll
        for (auto &part : weights) settle(part.at);
        begin_products(result);
#pragma unroll
        for (int step = 0; step < TILE_ROWS / 16; step++) {
            multiply_group<T>(result, weights[step].at[0], right + further(step * 16 * 128));
        }
        end_products(result);
    }
};
#endif
