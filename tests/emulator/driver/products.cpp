// Products on tensor cores, as PTX defines them. "Asynchronous Warpgroup Level Matrix Instructions". A product is computed when the first thread waits
// for it, from what shared memory has then, which must be what it had when the last thread began it. Until a thread has
// waited, its results are garbage, which nobody may write to.
#include "products.hpp"

#include <cstdio>
#include <cstring>
#include <deque>
#include <unordered_map>
#include <vector>

namespace emulated::products {
namespace {

constexpr unsigned GROUP = 128; // threads

struct Part {
    unsigned left[4];
    float *results[64];
    float before[64];
    size_t follows; // the product whose results it adds to, one more than its number; 0: what was in the registers
};

struct Product {
    unsigned long long right;
    int columns;
    bool turned;
    float (*value)(unsigned short);
    unsigned at_barrier, begun = 0, taken = 0;
    bool computed = false;
    std::vector<unsigned short> b; // (16, columns)
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

Thread &mine() {
    if (all_threads.empty()) {
        all_threads.resize(threads());
        warpgroups.resize(threads() / GROUP);
    }
    return all_threads[current_thread()];
}

size_t piece(const void *address) { return reinterpret_cast<size_t>(address) / 16; }

// One element of b: row and column of a matrix whose rows are 128 bytes, swizzled. The leading dimension's offset is from 64
// columns to the next if it is turned, and else unused; the stride dimension's is from eight rows to the next.
const unsigned char *element(const Product &product, int k, int n) {
    unsigned long long right = product.right;
    auto field = [&](int bit) { return static_cast<unsigned>(right >> bit & 0x3fff) << 4; };
    unsigned start = field(0), leading = field(16), stride = field(32);
    unsigned at = product.turned ? start + n / 64 * leading + n % 64 * 2 + k / 8 * stride + k % 8 * 128
                                 : start + n / 8 * stride + n % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    auto byte = shared_byte(at & 0x3ffff);
    if (!byte)
        emulated_fail(ILLEGAL_ADDRESS, "wgmma: row %d, column %d of b is not in shared memory, by descriptor %#llx", k, n, right);
    return byte;
}

void check_descriptor(unsigned long long right) {
    if (right >> 62 != 1)
        emulated_fail(LAUNCH_FAILED, "wgmma: descriptor %#llx: only 128 bytes of swizzle are emulated", right);
    if (right & 0x3fff'c000'c000'c000)
        emulated_fail(LAUNCH_FAILED, "wgmma: descriptor %#llx has a base offset, or bits that mean nothing", right);
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

std::vector<unsigned short> read(const Product &product) {
    std::vector<unsigned short> b(16 * product.columns);
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < product.columns; n++) {
            auto byte = element(product, k, n);
            memcpy(&b[k * product.columns + n], byte, 2);
            check_copied(byte);
        }
    return b;
}

void compute(Warpgroup &group, size_t number) {
    Product &product = group.at(number);
    if (read(product) != product.b)
        emulated_fail(LAUNCH_FAILED, "shared memory that a wgmma reads was written before anybody waited for the wgmma");
    float a[64][16];
    for (unsigned thread = 0; thread < GROUP; thread++)
        for (int i = 0; i < 8; i++) {
            int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = thread % 4 * 2 + i % 2 + i / 4 * 8;
            a[row][column] = product.value(product.parts[thread].left[i / 2] >> i % 2 * 16);
        }
    std::vector<float> b(product.b.size());
    for (size_t i = 0; i < b.size(); i++)
        b[i] = product.value(product.b[i]);
    int own = product.columns / 2;
    product.results.resize(GROUP * own);
    for (unsigned thread = 0; thread < GROUP; thread++)
        for (int i = 0; i < own; i++) {
            const Part &part = product.parts[thread];
            int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            float sum = part.follows ? group.at(part.follows - 1).results[thread * own + i] : part.before[i];
            for (int k = 0; k < 16; k++)
                sum += a[row][k] * b[k * product.columns + column];
            product.results[thread * own + i] = sum;
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
    for (int i = 0; last && i < product.columns / 2; i++) {
        unsigned bits;
        memcpy(&bits, part.results[i], sizeof bits);
        if (bits != ~0u)
            emulated_fail(LAUNCH_FAILED, "a result of a wgmma was written to before the thread waited for the wgmma");
        *part.results[i] = product.results[in_group * product.columns / 2 + i];
    }
    product.taken++;
}

// Adds a (16, K) times b (K, 8) to the sums of the lanes.
template <int K> void add_product(WarpProduct *const (&lanes)[32], const float (&a)[16][K], const float (&b)[K][8]) {
    for (int row = 0; row < 16; row++) {
        float *pairs[4], sums[8];
        for (int i = 0; i < 4; i++) {
            pairs[i] = lanes[row % 8 * 4 + i]->sums + row / 8 * 2;
            memcpy(sums + 2 * i, pairs[i], 2 * sizeof(float));
        }
        for (int k = 0; k < K; k++)
            for (int column = 0; column < 8; column++)
                sums[column] += a[row][k] * b[k][column];
        for (int i = 0; i < 4; i++)
            memcpy(pairs[i], sums + 2 * i, 2 * sizeof(float));
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

void emulated_fence_copies() {
    for (size_t at : mine().arrived)
        copies[at] = {Copied::fenced, barriers()};
    mine().arrived.clear();
}

void emulated_fence_registers() { mine().fenced = true; }

void emulated_begin_product(const GroupProduct &given) {
    Thread &thread = mine();
    unsigned in_group = current_thread() % GROUP;
    if (current_thread() / GROUP >= warpgroups.size())
        emulated_fail(LAUNCH_FAILED, "wgmma in a warpgroup of fewer than %u threads", GROUP);
    if (!thread.fenced)
        emulated_fail(LAUNCH_FAILED, "wgmma without a wgmma.fence since the thread last waited for one");
    check_descriptor(given.right);
    Warpgroup &group = warpgroups[current_thread() / GROUP];
    size_t number = thread.begun++;
    if (number == group.first + group.products.size()) {
        group.products.emplace_back();
        Product &fresh = group.products.back();
        fresh.right = given.right, fresh.columns = given.columns, fresh.turned = given.turned;
        fresh.value = given.value, fresh.at_barrier = barriers();
    }
    Product &product = group.at(number);
    if (product.right != given.right || product.columns != given.columns || product.turned != given.turned ||
        product.value != given.value || product.at_barrier != barriers())
        emulated_fail(LAUNCH_FAILED, "threads of a warpgroup begin different products");
    Part &part = product.parts[in_group];
    memcpy(part.left, given.left, sizeof part.left);
    memcpy(part.results, given.results, sizeof part.results);
    part.follows = 0;
    for (size_t earlier = thread.taken; earlier < number; earlier++)
        if (group.at(earlier).parts[in_group].results[0] == part.results[0])
            part.follows = earlier + 1;
    if (part.follows && group.at(part.follows - 1).columns != product.columns)
        emulated_fail(LAUNCH_FAILED, "wgmma adds to results, not waited for, of another shape");
    for (int i = 0; i < product.columns / 2; i++) {
        part.before[i] = *part.results[i];
        memset(part.results[i], GARBAGE, sizeof(float));
    }
    if (++product.begun == GROUP)
        product.b = read(product);
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
