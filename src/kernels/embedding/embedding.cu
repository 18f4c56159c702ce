// Rows of a table by number, and sums of rows with one number. A number that names no row reads NaN,
// and is summed nowhere: to report it would be to wait for it.

template <class T> DEVICE void gather(T *y, const u32 *ids, const T *table, size_t n, size_t rows, size_t d) {
    constexpr int V = PACK<T>;
    bool packed = aligned(y) && aligned(table) && d % V == 0;
    along<V>(n * d, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        u32 id = ids[i / d];
        Acc<T> u[N];
        if (id < rows) {
            read(table + id * d + i % d, u);
        } else {
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = infinity<Acc<T>>() - infinity<Acc<T>>();
        }
        write(y + i, u);
    });
}

// Writes the places of `ids` to `order` by their numbers, and places of one number in their order:
// each is where it belongs when as many are counted as come before it. No number waits for another,
// so that the order is the same every time.
KERNEL sort_places(u32 *order, const u32 *ids, size_t n) {
    __shared__ u32 tile[256];
    size_t place = global_thread(), before = 0;
    u32 id = place < n ? ids[place] : 0;
    size_t own = (size_t)blockIdx.x * 256;
    for (size_t first = 0; first < n; first += 256) {
        __syncthreads(); // whoever still reads the tile before
        if (first + threadIdx.x < n) tile[threadIdx.x] = ids[first + threadIdx.x];
        __syncthreads();
        u32 count = 0;
        int len = n - first < 256 ? (int)(n - first) : 256;
        if (first < own) {
            for (int j = 0; j < len; j++) count += tile[j] <= id;
        } else if (first > own) {
            for (int j = 0; j < len; j++) count += tile[j] < id;
        } else {
            for (int j = 0; j < len; j++) count += tile[j] < id || (tile[j] == id && j < (int)threadIdx.x);
        }
        before += count;
    }
    if (place < n) order[before] = (u32)place;
}

// The sums of the rows of `grad` (n, d) with one number, into rows of y that are zero, or hold the sums
// before. A block has the places of a number that begin at its own; its eight warps take every eighth.
// At most 64 rows are added up in the type of the arithmetic, and those in F64.
template <class T, class O, int V>
DEVICE void scatter_add(O *y, const u32 *order, const u32 *ids, const T *grad, size_t n, size_t rows, size_t d) {
    typedef Acc<T> A;
    __shared__ double sums[8][32 * V];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (size_t begin = blockIdx.x; begin < n; begin += gridDim.x) {
        u32 id = ids[order[begin]];
        if (id >= rows || (begin > 0 && ids[order[begin - 1]] == id)) continue; // for the whole block
        for (size_t tile = 0; tile < d; tile += 32 * V) {
            size_t column = tile + lane * V;
            double total[V] = {};
            A sum[V] = {};
            int held = 0;
            for (size_t at = begin + warp; at < n; at += 8) {
                u32 place = order[at];
                if (ids[place] != id) break;
                if (column < d) {
                    A u[V];
                    read(grad + place * d + column, u);
#pragma unroll
                    for (int k = 0; k < V; k++) sum[k] += u[k];
                }
                if (++held == 64) {
#pragma unroll
                    for (int k = 0; k < V; k++) total[k] += sum[k], sum[k] = A(0);
                    held = 0;
                }
            }
            __syncthreads(); // whoever still reads the sums before
#pragma unroll
            for (int k = 0; k < V; k++) sums[warp][k * 32 + lane] = total[k] + sum[k];
            __syncthreads();
            for (int i = threadIdx.x; i < 32 * V; i += 256) {
                double all = 0;
                for (int w = 0; w < 8; w++) all += sums[w][i];
                size_t to = tile + i % 32 * V + i / 32;
                if (to < d) {
                    O *sum = y + id * d + to;
                    narrow((double)widen(*sum) + all, *sum);
                }
            }
        }
    }
}

// Numbers as U32; what does not fit names no row.
template <class I> DEVICE void numbers(u32 *y, const I *x, size_t n) {
    for (size_t i = global_thread(); i < n; i += global_threads()) {
        y[i] = (u64)x[i] > 0xffffffffu ? 0xffffffffu : (u32)x[i]; // the negative are the largest
    }
}

KERNEL numbers_i64(u32 *y, const long long *x, size_t n) { numbers(y, x, n); }
KERNEL numbers_u8(u32 *y, const u8 *x, size_t n) { numbers(y, x, n); }

#define GATHER(t, T)                                                                              \
    KERNEL gather_##t(T *y, const u32 *ids, const T *table, size_t n, size_t rows, size_t d) {    \
        gather(y, ids, table, n, rows, d);                                                        \
    }
#define SCATTER(t, T, o, O)                                                                       \
    KERNEL scatter_add_##t##_##o(O *y, const u32 *order, const u32 *ids, const T *grad, size_t n, \
                                 size_t rows, size_t d) {                                         \
        if (d % PACK<T> == 0 && aligned(grad)) {                                                  \
            scatter_add<T, O, PACK<T>>(y, order, ids, grad, n, rows, d);                          \
        } else {                                                                                  \
            scatter_add<T, O, 1>(y, order, ids, grad, n, rows, d);                                \
        }                                                                                         \
    }
EACH_FLOAT(GATHER)
EACH_PAIR(SCATTER)
