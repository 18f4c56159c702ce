// Modules, their kernels, and launches.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <link.h>
#include <map>
#include <set>
#include <sstream>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../compiler/compiler.hpp"
#include "driver.hpp"

namespace emulated {
namespace {

struct Function {
    std::string name;
    const Kernel *kernel;
    unsigned max_dynamic_shared = SHARED;
};

struct Module {
    void *library;
    std::map<std::string, std::unique_ptr<Function>> functions;
    std::vector<void *> variables;
};

// A library of its own for each module, even where two have the same image: with its own variables.
void *open_copy(const std::string &path) {
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library)
        return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    dlclose(library);
    // By a name that no other has had: dlopen knows libraries by name.
    char name[] = "/tmp/emulated-gpu-XXXXXX";
    int from = open(path.c_str(), O_RDONLY), to = mkstemp(name);
    struct stat status;
    fstat(from, &status);
    for (off_t done = 0; done < status.st_size;)
        if (sendfile(to, from, &done, status.st_size - done) <= 0)
            break;
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    unlink(name);
    close(from);
    close(to);
    return library;
}

int load(Module **module, const std::string &image) {
    if (sticky)
        return sticky;
    Compiled compiled;
    {
        static std::mutex one_compiler;
        std::lock_guard guard(one_compiler);
        compiled = load_image(image);
    }
    if (compiled.object.empty())
        return complain(INVALID_PTX, "a module cannot be loaded: %s", compiled.log.c_str());
    std::lock_guard guard(device_lock());
    void *library = open_copy(compiled.object);
    if (!library)
        return complain(INVALID_PTX, "a module cannot be loaded: %s", dlerror());
    *module = new Module{library, {}, {}};
    return SUCCESS;
}

unsigned long long seed_of(const std::string &kernel) {
    const char *text = getenv("EMULATED_GPU_SEED");
    unsigned long long seed = text ? strtoull(text, nullptr, 0) : 0;
    if (!seed)
        return 0;
    for (unsigned char c : kernel) // the same in each run, whatever other threads launch
        seed = (seed ^ c) * 0x100000001b3;
    return seed | 1;
}

int check(const Function &function, dim3 grid, dim3 block, unsigned dynamic_shared) {
    const char *name = function.name.c_str();
    unsigned long threads = static_cast<unsigned long>(block.x) * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.x > 2147483647 || grid.y > 65535 || grid.z > 65535)
        return complain(INVALID_VALUE, "%s: a grid of %u x %u x %u", name, grid.x, grid.y, grid.z);
    if (!threads || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024)
        return complain(INVALID_VALUE, "%s: a block of %u x %u x %u", name, block.x, block.y, block.z);
    if (threads > function.kernel->max_threads)
        return complain(LAUNCH_OUT_OF_RESOURCES, "%s: %lu threads, where its launch bounds are %u", name, threads,
                        function.kernel->max_threads);
    if (dynamic_shared > function.max_dynamic_shared)
        return complain(INVALID_VALUE, "%s: %u bytes of dynamic shared memory, where it may have %u", name,
                        dynamic_shared, function.max_dynamic_shared);
    return SUCCESS;
}

int launch(void *handle, dim3 grid, dim3 block, unsigned dynamic_shared, void *stream, void **arguments) {
    if (sticky)
        return sticky;
    auto function = static_cast<Function *>(handle);
    if (!function)
        return INVALID_HANDLE;
    if (int error = check(*function, grid, block, dynamic_shared))
        return error;
    count(function->name.c_str());
    if (idle() && !capturing(stream))
        return submit(stream, "cuLaunchKernel", nullptr);
    // Copied, as a launch does.
    auto values = std::make_shared<std::vector<std::vector<unsigned long long>>>();
    for (unsigned i = 0; i < function->kernel->count; i++) {
        if (!arguments || !arguments[i])
            return complain(INVALID_VALUE, "%s: argument %u is missing", function->name.c_str(), i);
        unsigned size = function->kernel->sizes[i];
        values->emplace_back((size + 7) / 8);
        memcpy(values->back().data(), arguments[i], size);
    }
    return submit(stream, "cuLaunchKernel", [=] {
        std::vector<void *> pointers;
        for (auto &value : *values)
            pointers.push_back(value.data());
        pointers.push_back(nullptr);
        static const bool trace = getenv("EMULATED_GPU_TRACE");
        if (trace)
            fprintf(stderr, "emulated GPU: %s <<<(%u, %u, %u), (%u, %u, %u), %u>>>\n", function->name.c_str(), grid.x,
                    grid.y, grid.z, block.x, block.y, block.z, dynamic_shared);
        watch(true);
        Outcome outcome =
            run({function->kernel, grid, block, dynamic_shared, pointers.data()}, seed_of(function->name));
        watch(false);
        if (outcome.error)
            sticky = complain(outcome.error, "kernel %s, %s", function->name.c_str(), outcome.message.c_str());
        return outcome.error;
    });
}

} // namespace

extern "C" {

int cuModuleLoadData(Module **module, const void *image) {
    if (int error = not_while_capturing("cuModuleLoadData"))
        return error;
    return load(module, static_cast<const char *>(image));
}
int cuModuleLoadDataEx(Module **module, const void *image, unsigned, int *, void **) {
    return cuModuleLoadData(module, image);
}
int cuModuleLoad(Module **module, const char *path) {
    std::ifstream file(path);
    if (!file)
        return FILE_NOT_FOUND;
    std::stringstream text;
    text << file.rdbuf();
    return load(module, text.str());
}
int cuModuleUnload(Module *module) {
    finish_all(); // before the lock, for what others may have to do first
    std::lock_guard guard(device_lock());
    for (void *variable : module->variables)
        memory::remove_variable(variable);
    dlclose(module->library);
    delete module;
    return SUCCESS;
}
int cuModuleGetFunction(void **result, Module *module, const char *name) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    auto kernel = static_cast<const Kernel *>(dlsym(module->library, (std::string("emulated_kernel_") + name).c_str()));
    if (!kernel)
        return complain(NOT_FOUND, "there is no kernel %s", name);
    auto &function = module->functions[name];
    if (!function)
        function = std::make_unique<Function>(Function{name, kernel});
    *result = function.get();
    return SUCCESS;
}
int cuModuleGetGlobal_v2(void **pointer, size_t *size, Module *module, const char *name) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    void *variable = dlsym(module->library, name);
    Dl_info info;
    const ElfW(Sym) *symbol = nullptr;
    if (!variable ||
        !dladdr1(variable, &info, reinterpret_cast<void **>(const_cast<ElfW(Sym) **>(&symbol)), RTLD_DL_SYMENT) ||
        !symbol)
        return NOT_FOUND;
    memory::add_variable(variable, symbol->st_size);
    module->variables.push_back(variable);
    if (pointer)
        *pointer = variable;
    if (size)
        *size = symbol->st_size;
    return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, Function *function) {
    switch (attribute) {
    case 0:
        *value = function->kernel->max_threads;
        break;
    case 4: // registers of a thread: as many as its bounds leave
        *value = 32;
        break;
    case 5:
    case 6:
        *value = 90;
        break;
    case 8:
        *value = function->max_dynamic_shared;
        break;
    default:
        *value = 0;
    }
    return SUCCESS;
}
int cuFuncSetAttribute(Function *function, int attribute, int value) {
    count(__func__);
    if (attribute == 8) {
        if (value < 0 || value > int(SHARED_OPT_IN))
            return complain(INVALID_VALUE, "%s: %d bytes of dynamic shared memory, where there are %u",
                            function->name.c_str(), value, SHARED_OPT_IN);
        function->max_dynamic_shared = value;
    }
    return SUCCESS;
}
int cuFuncSetCacheConfig(Function *, int) { return SUCCESS; }
int cuFuncGetName(const char **name, Function *function) {
    *name = function->name.c_str();
    return SUCCESS;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
    if (extra)
        return complain(NOT_SUPPORTED, "cuLaunchKernel with extra is not implemented");
    return launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, arguments);
}

int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, Function *, int threads, size_t shared,
                                                         unsigned) {
    if (threads < 1 || threads > 1024)
        return INVALID_VALUE;
    int by_threads = 2048 / ((threads + 31) / 32 * 32), by_shared = 233472 / (shared + 1024);
    *blocks = std::min({32, by_threads, by_shared});
    return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Function *function, int threads, size_t shared) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
int cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, Function *function, size_t (*shared_of)(int),
                                              size_t shared, int limit, unsigned) {
    *block = std::min<int>(function->kernel->max_threads, limit ? limit : 1024);
    int blocks;
    int error =
        cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, *block, shared_of ? shared_of(*block) : shared);
    *grid = blocks * MULTIPROCESSORS;
    return error;
}
int cuOccupancyMaxPotentialBlockSize(int *grid, int *block, Function *function, size_t (*shared_of)(int), size_t shared,
                                     int limit) {
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_of, shared, limit, 0);
}
int cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, Function *, int blocks, int) {
    *bytes = std::min<size_t>(SHARED_OPT_IN, 233472 / std::max(blocks, 1) - 1024);
    return SUCCESS;
}
// Blocks run one after another: those that wait for one another end as threads that do.
int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                              unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments) {
    int blocks;
    if (int error = cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, static_cast<Function *>(function),
                                                                block_x * block_y * block_z, shared))
        return error;
    if (static_cast<unsigned long>(grid_x) * grid_y * grid_z > static_cast<unsigned long>(blocks) * MULTIPROCESSORS)
        return COOPERATIVE_LAUNCH_TOO_LARGE;
    return launch(function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, arguments);
}
}

} // namespace emulated
