// libcurand: other numbers than the real one's, of the same distributions.
#include <cmath>
#include <random>

#include "../driver/driver.hpp"

namespace emulated {
namespace {

enum Status { RAND_SUCCESS = 0, RAND_NOT_INITIALIZED = 101, RAND_LENGTH_NOT_MULTIPLE = 105, RAND_LAUNCH_FAILURE = 201 };

struct Generator {
    unsigned long long seed = 0, offset = 0;
    std::mt19937_64 engine{0};
    void *stream = nullptr;

    void restart() {
        engine.seed(seed);
        engine.discard(offset);
    }
    // Above 0, and up to 1: as cuRAND's are.
    double uniform() { return (static_cast<double>(engine() >> 11) + 1) * 0x1p-53; }
    double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(2 * M_PI * uniform()); }
};

template <class T, class F> int generate(Generator *generator, T *to, size_t count, F next) {
    if (!generator)
        return RAND_NOT_INITIALIZED;
    int error = submit(generator->stream, "curandGenerate", [=] {
        if (!memory::valid(to, count * sizeof(T)))
            return sticky = complain(ILLEGAL_ADDRESS, "curandGenerate of %zu numbers: access %s", count,
                                     memory::describe(to + count - 1).c_str());
        for (size_t i = 0; i < count; i++)
            to[i] = next(*generator);
        return int(SUCCESS);
    });
    if (!error && !capturing(generator->stream)) // a generator may be gone before its stream is done
        error = finish(generator->stream);
    return error ? RAND_LAUNCH_FAILURE : RAND_SUCCESS;
}

template <class T> int normal(Generator *generator, T *to, size_t count, T mean, T deviation) {
    if (count % 2)
        return complain(RAND_LENGTH_NOT_MULTIPLE, "curandGenerateNormal of %zu numbers, which is odd", count);
    return generate(generator, to, count, [=](Generator &g) { return T(mean + deviation * g.normal()); });
}

template <class T> int log_normal(Generator *generator, T *to, size_t count, T mean, T deviation) {
    if (count % 2)
        return complain(RAND_LENGTH_NOT_MULTIPLE, "curandGenerateLogNormal of %zu numbers, which is odd", count);
    return generate(generator, to, count, [=](Generator &g) { return T(std::exp(mean + deviation * g.normal())); });
}

} // namespace

extern "C" {

int curandCreateGenerator(Generator **generator, int) {
    *generator = new Generator;
    return RAND_SUCCESS;
}
int curandDestroyGenerator(Generator *generator) {
    delete generator;
    return RAND_SUCCESS;
}
int curandGetVersion(int *version) {
    *version = 10400;
    return RAND_SUCCESS;
}
int curandSetStream(Generator *generator, void *stream) {
    generator->stream = stream;
    return RAND_SUCCESS;
}
int curandSetPseudoRandomGeneratorSeed(Generator *generator, unsigned long long seed) {
    generator->seed = seed;
    generator->restart();
    return RAND_SUCCESS;
}
int curandSetGeneratorOffset(Generator *generator, unsigned long long offset) {
    generator->offset = offset;
    generator->restart();
    return RAND_SUCCESS;
}
int curandSetGeneratorOrdering(Generator *, int) { return RAND_SUCCESS; }
int curandGenerateSeeds(Generator *) { return RAND_SUCCESS; }
int curandGenerate(Generator *generator, unsigned *to, size_t count) {
    return generate(generator, to, count, [](Generator &g) { return static_cast<unsigned>(g.engine() >> 32); });
}
int curandGenerateLongLong(Generator *generator, unsigned long long *to, size_t count) {
    return generate(generator, to, count, [](Generator &g) -> unsigned long long { return g.engine(); });
}
int curandGenerateUniform(Generator *generator, float *to, size_t count) {
    return generate(generator, to, count, [](Generator &g) { return static_cast<float>(g.uniform()); });
}
int curandGenerateUniformDouble(Generator *generator, double *to, size_t count) {
    return generate(generator, to, count, [](Generator &g) { return g.uniform(); });
}
int curandGenerateNormal(Generator *generator, float *to, size_t count, float mean, float deviation) {
    return normal(generator, to, count, mean, deviation);
}
int curandGenerateNormalDouble(Generator *generator, double *to, size_t count, double mean, double deviation) {
    return normal(generator, to, count, mean, deviation);
}
int curandGenerateLogNormal(Generator *generator, float *to, size_t count, float mean, float deviation) {
    return log_normal(generator, to, count, mean, deviation);
}
int curandGenerateLogNormalDouble(Generator *generator, double *to, size_t count, double mean, double deviation) {
    return log_normal(generator, to, count, mean, deviation);
}
int curandGeneratePoisson(Generator *generator, unsigned *to, size_t count, double lambda) {
    return generate(generator, to, count,
                    [=](Generator &g) { return std::poisson_distribution<unsigned>(lambda)(g.engine); });
}
}

} // namespace emulated
