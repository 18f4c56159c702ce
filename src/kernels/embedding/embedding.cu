// Embedding: rows of a table by number, and in backward sums of the gradient's rows by number.
//
// A number that names no row reads NaN, and its gradient is dropped: an error would have to wait for the device.
//
// Backward adds all gradient rows with one number. Atomics would add them in another order every time. So `sort_places`
// sorts the places by number first. Each thread counts the numbers that come before its own, and that count is its
// place in the order. That compares every number with every other, so the host limits how many are sorted at a time.
//
// `scatter_add` then sums neighbours of one number, and adds the sum to that row of the result. A frequent number may
// have all rows, so work is cut by place and not by number: a warp has PIECE places. `join_parts` adds the sums of a
// number that reaches over several pieces.

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

// The rows of `grad` (n, d) with one number, a *run*, lie one after another in `order`, and their sum is added to the
// row of y. A run may be all of them, so that it is cut: a warp has PIECE places of `order` and a tile of columns.
// Runs within a piece are added to y here; of one that reaches into other pieces, the sums of each piece go to
// `parts` (pieces, 2, d): first the run that holds the piece's first place, then the one that holds its last.
constexpr int PIECE = 64;

// The number at a place of `order`.
DEVICE u32 number(const u32 *order, const u32 *ids, size_t at) { return ids[order[at]]; }

template <class T, class O, int V>
DEVICE void scatter_add(O *y, double *parts, const u32 *order, const u32 *ids, const T *grad, size_t n, size_t rows,
                        size_t d) {
    typedef Acc<T> A;
    constexpr int AHEAD = 4; // rows that are read before the first is added
    size_t tiles = (d + 32 * V - 1) / (32 * V), pieces = (n + PIECE - 1) / PIECE;
    for (size_t task = global_thread() / 32; task < pieces * tiles; task += global_threads() / 32) {
        size_t piece = task / tiles, column = (task % tiles * 32 + threadIdx.x % 32) * V;
        size_t first = piece * PIECE, end = first + PIECE < n ? first + PIECE : n;
        if (column >= d) continue;
        u32 id = number(order, ids, first);
        bool begins = first == 0 || number(order, ids, first - 1) != id;
        int which = 0;
        A sum[V] = {};
        for (size_t at = first; at < end; at += AHEAD) {
            A ahead[AHEAD][V];
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + i < end) read(grad + order[at + i] * d + column, ahead[i]);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                size_t next = at + i + 1;
                if (next > end) break;
#pragma unroll
                for (int k = 0; k < V; k++) sum[k] += ahead[i][k];
                u32 after = next < n ? number(order, ids, next) : ~id;
                if (next < end && after == id) continue;
                if (id < rows && begins && after != id) {
                    O *to = y + id * d + column;
#pragma unroll
                    for (int k = 0; k < V; k++) narrow((double)widen(to[k]) + (double)sum[k], to[k]);
                } else if (id < rows) {
                    double *to = parts + (piece * 2 + which) * d + column;
#pragma unroll
                    for (int k = 0; k < V; k++) to[k] = sum[k];
                }
#pragma unroll
                for (int k = 0; k < V; k++) sum[k] = A(0);
                id = after, begins = true, which = 1;
            }
        }
    }
}

// Adds the sums of a run that reaches into other pieces to its row of y: a block for the piece that the run begins in
// and 32 columns, whose eight warps take every eighth piece.
template <class O>
DEVICE void join_parts(O *y, const double *parts, const u32 *order, const u32 *ids, size_t n, size_t rows, size_t d) {
    __shared__ double sums[8][32];
    size_t tiles = (d + 31) / 32, pieces = (n + PIECE - 1) / PIECE;
    size_t piece = blockIdx.x / tiles, first = piece * PIECE, end = first + PIECE;
    if (end >= n) return; // as below, for the whole block
    u32 id = number(order, ids, end - 1);
    if (id >= rows || number(order, ids, end) != id) return;
    bool whole = number(order, ids, first) == id;
    if (whole && first > 0 && number(order, ids, first - 1) == id) return; // it begins before
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    size_t column = blockIdx.x % tiles * 32 + lane;
    double sum = 0;
    for (size_t at = piece + warp; column < d && at < pieces; at += 8) {
        if (number(order, ids, at * PIECE) != id && at > piece) break;
        sum += parts[(at * 2 + (at == piece && !whole)) * d + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= d) return;
    sum = 0;
    for (int i = 0; i < 8; i++) sum += sums[i][lane];
    O *to = y + id * d + column;
    narrow((double)widen(*to) + sum, *to);
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
    KERNEL scatter_add_##t##_##o(O *y, double *parts, const u32 *order, const u32 *ids,           \
                                 const T *grad, size_t n, size_t rows, size_t d) {                \
        if (d % PACK<T> == 0 && aligned(grad)) {                                                  \
            scatter_add<T, O, PACK<T>>(y, parts, order, ids, grad, n, rows, d);                   \
        } else {                                                                                  \
            scatter_add<T, O, 1>(y, parts, order, ids, grad, n, rows, d);                         \
        }                                                                                         \
    }                                                                                             \
    KERNEL join_parts_##t##_##o(O *y, const double *parts, const u32 *order, const u32 *ids,      \
                                size_t n, size_t rows, size_t d) {                                \
        join_parts(y, parts, order, ids, n, rows, d);                                             \
    }
EACH_FLOAT(GATHER)
EACH_PAIR(SCATTER)
