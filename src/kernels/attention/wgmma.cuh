// Products of a warpgroup, Hopper's: four warps with 64 rows multiply them with a matrix that lies in shared memory, by
// `wgmma`, and wait for the result. It is at places in registers that `mma.sync` has too. PTX ISA, "Asynchronous
// Warpgroup Level Matrix Instructions".
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
template <int N> DEVICE void begin_products(float (&c)[N][4]) {
    settle(c);
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

// The results are there.
template <int N> DEVICE void end_products(float (&c)[N][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
    settle(c);
}

// Where a matrix is in shared memory whose rows are 128 bytes, swizzled, in blocks of eight. `columns` apart, in bytes, are
// 64 columns and the next 64 of one that is turned.
DEVICE u64 matrix_at(const void *first, u32 columns) {
    constexpr u64 EIGHT_ROWS = 1024, SWIZZLED_128 = 1;
    u64 address = (u32)__cvta_generic_to_shared(first) & 0x3ffff;
    return address >> 4 | (u64)(columns >> 4) << 16 | (EIGHT_ROWS >> 4) << 32 | SWIZZLED_128 << 62;
}

#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define MULTIPLY_64(type, turned)                                                                    \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                     \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, " turned ";"                                   \
                 : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right)                            \
                 : "memory")
#define MULTIPLY_128(type, turned)                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                    \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
                 "{%64, %65, %66, %67}, %68, 1, 1, 1, " turned ";"                                   \
                 : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7),           \
                   FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(right)                            \
                 : "memory")

// Begins c (64, 8 N) += a (64, 16) b (16, 8 N). Of b, columns follow one another in memory if `TURNED`, and else rows.
template <class T, bool TURNED, int N> DEVICE void multiply_group(float (&c)[N][4], const u32 (&a)[4], u64 right) {
    static_assert(N == 8 || (N == 16 && TURNED), "no such product");
    if constexpr (N == 16) {
        if constexpr (IS_F16<T>) {
            MULTIPLY_128("f16", "1");
        } else {
            MULTIPLY_128("bf16", "1");
        }
    } else if constexpr (TURNED) {
        if constexpr (IS_F16<T>) {
            MULTIPLY_64("f16", "1");
        } else {
            MULTIPLY_64("bf16", "1");
        }
    } else {
        if constexpr (IS_F16<T>) {
            MULTIPLY_64("f16", "0");
        } else {
            MULTIPLY_64("bf16", "0");
        }
    }
}

// How a block of two or three warpgroups, as many as there are registers for, multiplies: tiles of keys and values are read
// by all of them, so that fewer of them come from the cache of the card.
template <int D, class T> struct OfGroups {
    static constexpr int ROWS = D == 64 ? 192 : 128, KEYS = 64;
    // Columns by 64. Packs of 16 bytes of a row are at other places in each of eight rows: eight of one column are in
    // different banks.
    typedef T Rows[D / 64][KEYS][64];
    static constexpr u32 COLUMNS = KEYS * 128; // bytes
    struct Tiles {
        Rows keys[2], values[2];
    };

    // The swizzle is one of addresses: it begins anew at multiples of 1024 bytes.
    DEVICE static Tiles &tiles() {
        extern __shared__ unsigned char memory[];
        u32 beyond = (u32)__cvta_generic_to_shared(memory) % 1024;
        return *(Tiles *)(memory + (1024 - beyond) % 1024);
    }

    DEVICE static void fetch(Rows &to, const T *from, size_t stride, size_t first, size_t rows, size_t width) {
#pragma unroll
        for (int i = threadIdx.x; i < KEYS * D / 8; i += 2 * ROWS) {
            int row = i / (D / 8), pack = i % (D / 8);
            bool there = first + row < rows && pack * 8 < width;
            const T *at = from + (first + row) * stride + pack * 8;
            copy_async<16>(&to[pack / 8][row][(pack % 8 ^ row % 8) * 8], at, there);
        }
    }

    // What threads have copied is there for tensor cores, too.
    DEVICE static void wait_for_tile() {
        arrived();
        asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
        __syncthreads();
    }

    // p = left keys^T
    DEVICE static void scores(float (&p)[KEYS / 8][4], Left<D, T> &left, const Rows &keys) {
        settle(left.at);
        begin_products(p);
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            multiply_group<T, false>(p, left.at[step], matrix_at(&keys[step / 4][0][step % 4 * 16], 16));
        }
        end_products(p);
    }

    // result += weights values
    DEVICE static void add(float (&result)[D / 8][4], Left<16, T> (&weights)[KEYS / 16], const Rows &values) {
#pragma unroll
        for (auto &part : weights) settle(part.at);
        begin_products(result);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            multiply_group<T, true>(result, weights[step].at[0], matrix_at(&values[0][step * 16][0], COLUMNS));
        }
        end_products(result);
    }
};
#endif
