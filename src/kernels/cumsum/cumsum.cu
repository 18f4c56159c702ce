// Sums up to each element of a line, from its start or its end, in F64.
//
// Where lines lie side by side, a thread has one, and neighbours read neighbouring elements. Where a line is a row, a team
// has it, a piece at a time: each thread adds up a run of the piece, the team exchanges these sums, and each thread adds
// what is before its run. Sums are not subtracted, so an infinity reaches only what is behind it.

constexpr int RUN = 4;   // elements of a piece that a thread has
constexpr int AHEAD = 8; // elements of a line that are read before the sums that need them are written

// Each thread of a team, all at once, brings a `sum`. Returns the total of the threads before it; `all` becomes that of
// the team.
DEVICE double sum_before(const Team &team, double sum, double &all) {
    __shared__ double warps[32];
    int lane = threadIdx.x & 31, warp = team.rank >> 5;
    for (int offset = 1; offset < 32; offset *= 2) {
        double other = __shfl_up_sync(0xffffffffu, sum, offset);
        if (lane >= offset) sum += other;
    }
    double before = __shfl_up_sync(0xffffffffu, sum, 1);
    if (lane == 0) before = 0;
    all = __shfl_sync(0xffffffffu, sum, 31);
    if (team.size == 32) return before;
    __syncthreads(); // whoever still reads the sums of the piece before
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    all = 0;
    for (int i = 0; i < team.size / 32; i++) {
        if (i == warp) before += all;
        all += warps[i];
    }
    return before;
}

template <class T, class O>
DEVICE void cumsum_rows(O *y, const T *x, size_t rows, size_t count, int from_end, int size) {
    Team team(size);
    bool packed = aligned(x) && aligned(y) && count % RUN == 0;
    for (size_t row = team.row; row < rows; row += team.teams) {
        const T *from = x + row * count;
        O *to = y + row * count;
        double before = 0;
        for (size_t piece = 0; piece < count; piece += (size_t)size * RUN) {
            size_t first = piece + (size_t)team.rank * RUN;
            bool whole = packed && first < count;
            size_t run = from_end ? count - RUN - first : first; // where it lies, if whole
            Acc<T> u[RUN];
            double sums[RUN], sum = 0, all;
            if (whole) read(from + run, u);
#pragma unroll
            for (int k = 0; k < RUN; k++) {
                size_t i = first + k;
                if (whole) {
                    sum += from_end ? u[RUN - 1 - k] : u[k];
                } else if (i < count) {
                    sum += widen(from[from_end ? count - 1 - i : i]);
                }
                sums[k] = sum;
            }
            double own = before + sum_before(team, sum, all);
            if (whole) {
                double results[RUN];
#pragma unroll
                for (int k = 0; k < RUN; k++) results[k] = own + (from_end ? sums[RUN - 1 - k] : sums[k]);
                write(to + run, results);
            } else {
#pragma unroll
                for (int k = 0; k < RUN; k++) {
                    size_t i = first + k;
                    if (i < count) narrow(own + sums[k], to[from_end ? count - 1 - i : i]);
                }
            }
            before += all;
        }
    }
}

template <class T, class O>
DEVICE void cumsum_lines(O *y, const T *x, size_t lines, size_t count, size_t inner, int from_end) {
    for (size_t line = global_thread(); line < lines; line += global_threads()) {
        size_t first = line / inner * count * inner + line % inner;
        double sum = 0;
        auto place = [&](size_t i) { return first + (from_end ? count - 1 - i : i) * inner; };
        for (size_t start = 0; start < count; start += AHEAD) {
            Acc<T> u[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (start + k < count) u[k] = widen(x[place(start + k)]);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                if (start + k >= count) break;
                sum += u[k];
                narrow(sum, y[place(start + k)]);
            }
        }
    }
}

#define CUMSUM(t, T, o, O)                                                                                           \
    ROW_KERNEL cumsum_rows_##t##_##o(O *y, const T *x, size_t rows, size_t count, int from_end, int team) {          \
        cumsum_rows(y, x, rows, count, from_end, team);                                                              \
    }                                                                                                                \
    KERNEL cumsum_lines_##t##_##o(O *y, const T *x, size_t lines, size_t count, size_t inner, int from_end) {        \
        cumsum_lines(y, x, lines, count, inner, from_end);                                                           \
    }
EACH_PAIR(CUMSUM)
