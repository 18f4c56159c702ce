// Products on tensor cores, as PTX defines them. "Asynchronous Warpgroup Level Matrix Instructions". A product is computed when the first thread waits
// for it, from what shared memory has then, which must be what it had when the first thread began it. Until a thread has
// waited, its results are garbage, which nobody may write to.
#include "products.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <unordered_map>
#include <vector>

namespace emulated::products {
namespace {

constexpr unsigned GROUP = 128; // threads

// As tensor cores round what they add up: seen on an H200, where sums of many products were too small.
float towards_zero(double sum) {
    float nearest = sum;
    bool beyond = std::abs(nearest) > std::abs(sum) && !std::isinf(nearest);
    return beyond ? std::nextafter(nearest, 0.f) : nearest;
}

struct Part {
    unsigned left[4];
    float *results[64];
    float before[64];
    size_t follows; // the product whose results it adds to, one more than its number; 0: what was in the registers
};

// One of shared memory: a, turned, is (16, 64), and b is (16, columns).
struct Matrix {
    char name;
    unsigned long long descriptor; // 0: there is none
    int columns;
    bool turned;
    bool operator!=(const Matrix &other) const {
        return descriptor != other.descriptor || columns != other.columns || turned != other.turned;
    }
};

struct Product {
    Matrix left, right;
    float (*value)(unsigned short);
    unsigned at_barrier, begun = 0, taken = 0;
    bool computed = false;
    std::vector<unsigned short> a, b;
    Part parts[GROUP];
    std::vector<float> results; // of each thread, one after another
};

struct Warpgroup {
    std::deque<Product> products;
    size_t first = 0; // the number of the first that is still there
    Product &at(size_t number) { return products[number - first]; }
};

struct Thread {
    bool fenced = false;
    unsigned fenced_before = 0; // the number of the barrier that its last `fence.proxy.async` came before, from 1 on
    size_t begun = 0, taken = 0, waits_for = 0;
    std::vector<size_t> groups; // the number of products begun at each commit
    std::vector<size_t> arrived; // copies for which there was no fence
};

// How far a copy of 16 bytes to shared memory has come.
struct Copied {
    enum { begun, arrived, fenced } state;
    unsigned at_barrier;
};

// Of the block that runs: empty until one of its threads needs them.
std::vector<Warpgroup> warpgroups;
std::vector<Thread> all_threads;
std::unordered_map<size_t, Copied> copies; // by address / 16

// Shared memory as tensor cores know it, by the lowest bits of addresses: all of it as it is at a barrier before which every
// thread has had a `fence.proxy.async`; how many had since the last barrier.
unsigned char known[1 << 18];
unsigned fences;

Thread &mine() {
    if (all_threads.empty()) {
        all_threads.resize(threads());
        warpgroups.resize(threads() / GROUP);
        memset(known, GARBAGE, sizeof known);
        fences = 0;
    }
    return all_threads[current_thread()];
}

size_t piece(const void *address) { return reinterpret_cast<size_t>(address) / 16; }

// The address, in shared memory, of row k, column n of a matrix whose rows are 128 bytes, swizzled. The leading dimension's
// offset is from 64 columns to the next if it is turned, and else unused; the stride dimension's is from eight rows to the next.
unsigned address(const Matrix &matrix, int k, int n) {
    auto field = [&](int bit) { return static_cast<unsigned>(matrix.descriptor >> bit & 0x3fff) << 4; };
    unsigned start = field(0), leading = field(16), stride = field(32);
    unsigned at = matrix.turned ? start + n / 64 * leading + n % 64 * 2 + k / 8 * stride + k % 8 * 128
                                : start + n / 8 * stride + n % 8 * 128 + k * 2;
    return (at ^ (at >> 7 & 7) << 4) & 0x3ffff;
}

void check_descriptor(unsigned long long descriptor) {
    if (descriptor >> 62 != 1)
        emulated_fail(LAUNCH_FAILED, "wgmma: descriptor %#llx: only 128 bytes of swizzle are emulated", descriptor);
    if (descriptor & 0x3fff'c000'c000'c000)
        emulated_fail(LAUNCH_FAILED, "wgmma: descriptor %#llx has a base offset, or bits that mean nothing", descriptor);
    if (descriptor & 0x38)
        emulated_fail(LAUNCH_FAILED, "wgmma: descriptor %#llx begins within eight rows: it needs a base offset", descriptor);
}

// That copies which it needs are there, and that tensor cores know.
void check_copied(const unsigned char *byte) {
    auto found = copies.find(piece(byte));
    if (found == copies.end())
        return;
    const Copied &copied = found->second;
    const char *missing = copied.state == Copied::begun     ? "nobody has waited for it"
                          : copied.state == Copied::arrived ? "no fence.proxy.async followed it"
                          : copied.at_barrier == barriers() ? "there was no barrier since its fence.proxy.async"
                                                            : nullptr;
    if (missing)
        emulated_fail(LAUNCH_FAILED, "wgmma reads what cp.async has copied, and %s", missing);
}

// Packs of eight numbers, which the swizzle leaves together. With `check`, they must be those that tensor cores know of.
std::vector<unsigned short> read(const Matrix &matrix, bool check) {
    if (!matrix.descriptor)
        return {};
    std::vector<unsigned short> all(16 * matrix.columns);
    for (int pack = 0; pack < 2 * matrix.columns; pack++) {
        int k = matrix.turned ? pack % 16 : pack % 2 * 8, n = matrix.turned ? pack / 16 * 8 : pack / 2;
        unsigned at = address(matrix, k, n);
        auto bytes = shared_byte(at);
        if (!bytes || !shared_byte(at + 15))
            emulated_fail(ILLEGAL_ADDRESS, "wgmma: row %d, column %d of %c is not in shared memory, by descriptor %#llx", k, n,
                          matrix.name, matrix.descriptor);
        check_copied(bytes);
        if (check && memcmp(bytes, known + at, 16))
            emulated_fail(LAUNCH_FAILED, "wgmma reads what was stored to shared memory, and there was no barrier since that "
                                         "before which each thread had a fence.proxy.async");
        unsigned short numbers[8];
        memcpy(numbers, bytes, sizeof numbers);
        for (int i = 0; i < 8; i++)
            all[matrix.turned ? k * matrix.columns + n + i : (k + i) * matrix.columns + n] = numbers[i];
    }
    return all;
}

void check_unchanged(const Product &product) {
    if (read(product.left, false) != product.a || read(product.right, false) != product.b)
        emulated_fail(LAUNCH_FAILED, "shared memory that a wgmma reads was written before anybody waited for the wgmma");
}

void compute(Warpgroup &group, size_t number) {
    Product &product = group.at(number);
    check_unchanged(product);
    float a[64][16];
    for (unsigned thread = 0; thread < GROUP; thread++)
        for (int i = 0; i < 8; i++) {
            int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = thread % 4 * 2 + i % 2 + i / 4 * 8;
            unsigned bits = product.left.descriptor ? product.a[column * 64 + row]
                                                    : product.parts[thread].left[i / 2] >> i % 2 * 16;
            a[row][column] = product.value(bits);
        }
    std::vector<float> b(product.b.size());
    for (size_t i = 0; i < b.size(); i++)
        b[i] = product.value(product.b[i]);
    int columns = product.right.columns, own = columns / 2;
    product.results.resize(GROUP * own);
    for (unsigned thread = 0; thread < GROUP; thread++)
        for (int i = 0; i < own; i++) {
            const Part &part = product.parts[thread];
            int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            double sum = part.follows ? group.at(part.follows - 1).results[thread * own + i] : part.before[i];
            for (int k = 0; k < 16; k++)
                sum += double(a[row][k]) * b[k * columns + column];
            product.results[thread * own + i] = towards_zero(sum);
        }
    product.computed = true;
}

// Gives the current thread the results of a product, unless a later one adds to them.
void take(Warpgroup &group, size_t number, size_t begun) {
    Product &product = group.at(number);
    unsigned in_group = current_thread() % GROUP;
    Part &part = product.parts[in_group];
    bool last = true;
    for (size_t later = number + 1; later < begun; later++)
        last &= group.at(later).parts[in_group].follows != number + 1;
    int own = product.right.columns / 2;
    for (int i = 0; last && i < own; i++) {
        unsigned bits;
        memcpy(&bits, part.results[i], sizeof bits);
        if (bits != ~0u)
            emulated_fail(LAUNCH_FAILED, "a result of a wgmma was written to before the thread waited for the wgmma");
        *part.results[i] = product.results[in_group * own + i];
    }
    product.taken++;
}

// Adds a (16, K) times b (K, 8) to the sums of the lanes.
template <int K> void add_product(WarpProduct *const (&lanes)[32], const float (&a)[16][K], const float (&b)[K][8]) {
    for (int row = 0; row < 16; row++) {
        float *pairs[4];
        double sums[8];
        for (int i = 0; i < 8; i++) {
            pairs[i / 2] = lanes[row % 8 * 4 + i / 2]->sums + row / 8 * 2;
            sums[i] = pairs[i / 2][i % 2];
        }
        for (int k = 0; k < K; k++)
            for (int column = 0; column < 8; column++)
                sums[column] += double(a[row][k]) * b[k][column];
        for (int i = 0; i < 8; i++)
            pairs[i / 2][i % 2] = towards_zero(sums[i]);
    }
}

// The fragments of m16n8k16, as PTX defines them: a (16, 16) in four registers of each lane, b (16, 8) in two, two numbers
// each, and sums (16, 8) in four.
void multiply_halves(WarpProduct *const (&lanes)[32]) {
    float a[16][16], b[16][8];
    auto value = lanes[0]->value;
    for (int lane = 0; lane < 32; lane++)
        for (int half = 0; half < 2; half++) {
            int g = lane / 4, k = lane % 4 * 2 + half;
            for (int i = 0; i < 4; i++)
                a[g + i % 2 * 8][k + i / 2 * 8] = value(lanes[lane]->left[i] >> 16 * half);
            for (int i = 0; i < 2; i++)
                b[k + i * 8][g] = value(lanes[lane]->right[i] >> 16 * half);
        }
    add_product(lanes, a, b);
}

// Those of m16n8k8: a (16, 8) in four registers, b (8, 8) in two, a number each. What is below TF32's bits is ignored.
void multiply_tf32(WarpProduct *const (&lanes)[32]) {
    float a[16][8], b[8][8];
    auto value = [](unsigned bits) {
        float number;
        bits &= 0xffffe000;
        memcpy(&number, &bits, sizeof number);
        return number;
    };
    for (int lane = 0; lane < 32; lane++) {
        int g = lane / 4, k = lane % 4;
        for (int i = 0; i < 4; i++)
            a[g + i % 2 * 8][k + i / 2 * 4] = value(lanes[lane]->left[i]);
        for (int i = 0; i < 2; i++)
            b[k + i * 4][g] = value(lanes[lane]->right[i]);
    }
    add_product(lanes, a, b);
}

} // namespace

void begin_block() {
    all_threads.clear();
    warpgroups.clear();
    copies.clear();
}

bool begun(unsigned thread) { return warpgroups[thread / GROUP].at(all_threads[thread].waits_for).begun == GROUP; }

void copy_begins(const void *to) { copies[piece(to)] = {Copied::begun, 0}; }

void copy_arrives(const void *to) {
    copies[piece(to)].state = Copied::arrived;
    mine().arrived.push_back(piece(to));
}

void barrier(unsigned met) {
    if (fences && fences == met)
        for (auto [start, size] : shared_memory()) {
            size_t at = reinterpret_cast<size_t>(start) % sizeof known, first = std::min(size, sizeof known - at);
            memcpy(known + at, start, first);
            memcpy(known, start + first, size - first);
        }
    fences = 0;
}

extern "C" {

void emulated_multiply(WarpProduct &mine) {
    Lanes met = emulated_exchange(Warp::matrix, ~0u, reinterpret_cast<size_t>(&mine));
    if (met.present != ~0u)
        emulated_fail(LAUNCH_FAILED, "mma.sync needs all lanes of a warp, and has %#x", met.present);
    if (!met.first) // it has computed what all get
        return;
    WarpProduct *lanes[32];
    for (int lane = 0; lane < 32; lane++) {
        lanes[lane] = reinterpret_cast<WarpProduct *>(met.value[lane]);
        if (lanes[lane]->value != mine.value)
            emulated_fail(LAUNCH_FAILED, "lanes of one warp are at mma.sync of different types");
    }
    mine.value ? multiply_halves(lanes) : multiply_tf32(lanes);
}

void emulated_fence_writes() {
    Thread &thread = mine();
    for (size_t at : thread.arrived)
        copies[at] = {Copied::fenced, barriers()};
    thread.arrived.clear();
    fences += thread.fenced_before != barriers() + 1;
    thread.fenced_before = barriers() + 1;
}

void emulated_fence_registers() { mine().fenced = true; }

void emulated_begin_product(const GroupProduct &given) {
    Thread &thread = mine();
    unsigned in_group = current_thread() % GROUP;
    if (current_thread() / GROUP >= warpgroups.size())
        emulated_fail(LAUNCH_FAILED, "wgmma in a warpgroup of fewer than %u threads", GROUP);
    if (!thread.fenced)
        emulated_fail(LAUNCH_FAILED, "wgmma without a wgmma.fence since the thread last waited for one");
    Matrix left{'a', given.left_matrix, 64, false}, right{'b', given.right, given.columns, given.turned};
    check_descriptor(right.descriptor);
    if (left.descriptor)
        check_descriptor(left.descriptor);
    Warpgroup &group = warpgroups[current_thread() / GROUP];
    size_t number = thread.begun++;
    if (number == group.first + group.products.size()) {
        group.products.emplace_back();
        Product &fresh = group.products.back();
        fresh.left = left, fresh.right = right, fresh.value = given.value, fresh.at_barrier = barriers();
        fresh.a = read(left, true), fresh.b = read(right, true);
    }
    Product &product = group.at(number);
    if (product.left != left || product.right != right || product.value != given.value || product.at_barrier != barriers())
        emulated_fail(LAUNCH_FAILED, "threads of a warpgroup begin different products");
    Part &part = product.parts[in_group];
    memcpy(part.left, given.left, sizeof part.left);
    memcpy(part.results, given.results, sizeof part.results);
    part.follows = 0;
    for (size_t earlier = thread.taken; earlier < number; earlier++)
        if (group.at(earlier).parts[in_group].results[0] == part.results[0])
            part.follows = earlier + 1;
    if (part.follows && group.at(part.follows - 1).right.columns != right.columns)
        emulated_fail(LAUNCH_FAILED, "wgmma adds to results, not waited for, of another shape");
    for (int i = 0; i < right.columns / 2; i++) {
        part.before[i] = *part.results[i];
        memset(part.results[i], GARBAGE, sizeof(float));
    }
    if (++product.begun == GROUP)
        check_unchanged(product);
}

void emulated_commit_products() { mine().groups.push_back(mine().begun); }

void emulated_wait_for_products(unsigned groups) {
    Thread &thread = mine();
    if (current_thread() / GROUP >= warpgroups.size())
        return; // where none can begin
    Warpgroup &group = warpgroups[current_thread() / GROUP];
    for (; thread.groups.size() > groups; thread.groups.erase(thread.groups.begin()))
        for (; thread.taken < thread.groups.front(); thread.taken++) {
            thread.waits_for = thread.taken;
            if (!begun(current_thread()))
                wait_for_warpgroup();
            if (!group.at(thread.taken).computed)
                compute(group, thread.taken);
            take(group, thread.taken, thread.begun);
        }
    thread.fenced = false;
    // Once nobody needs any of them.
    bool done = true;
    for (const Product &product : group.products)
        done &= product.taken == GROUP;
    if (done) {
        group.first += group.products.size();
        group.products.clear();
    }
}
}

} // namespace emulated::products
