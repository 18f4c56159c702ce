// libcudnn's graph API: graphs of one convolution, and of one whose sums a bias is added to.
#include "cudnn.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace emulated::dnn {
namespace {

enum Kind {
    POINTWISE = 0,
    CONVOLUTION = 1,
    ENGINE = 2,
    CONFIGURATION = 3,
    HEURISTIC = 4,
    PLAN = 5,
    OPERATION_FORWARD = 10,
    OPERATION_FILTER = 11,
    OPERATION_DATA = 12,
    OPERATION_POINTWISE = 13,
    GRAPH = 15,
    PACK = 16,
    TENSOR = 17
};

enum Type {
    HANDLE = 0,
    DATA_TYPE = 1,
    BOOLEAN = 2,
    INT64 = 3,
    FLOAT = 4,
    POINTER = 6,
    CONVOLUTION_MODE = 7,
    HEURISTIC_MODE = 8,
    NOTE = 11,
    POINTWISE_MODE = 14,
    DESCRIPTOR = 15
};

size_t width(int type) {
    switch (type) {
    case BOOLEAN:
        return 1;
    case HANDLE:
    case INT64:
    case POINTER:
    case DESCRIPTOR:
        return 8;
    default:
        return 4;
    }
}

// An attribute that a descriptor must have, and how many values: 0 for any number.
struct Rule {
    int kind, name, type, count;
};

const Rule RULES[] = {
    {TENSOR, 900, INT64, 1},
    {TENSOR, 901, DATA_TYPE, 1},
    {TENSOR, 902, INT64, 0},
    {TENSOR, 903, INT64, 0},
    {TENSOR, 906, INT64, 1},
    {TENSOR, 907, BOOLEAN, 1},
    {CONVOLUTION, 100, DATA_TYPE, 1},
    {CONVOLUTION, 101, CONVOLUTION_MODE, 1},
    {CONVOLUTION, 102, INT64, 0},
    {CONVOLUTION, 103, INT64, 0},
    {CONVOLUTION, 104, INT64, 0},
    {CONVOLUTION, 105, INT64, 0},
    {CONVOLUTION, 106, INT64, 1},
    {POINTWISE, 0, POINTWISE_MODE, 1},
    {POINTWISE, 1, DATA_TYPE, 1},
    {OPERATION_FORWARD, 700, FLOAT, 1},
    {OPERATION_FORWARD, 701, FLOAT, 1},
    {OPERATION_FORWARD, 702, DESCRIPTOR, 1},
    {OPERATION_FORWARD, 703, DESCRIPTOR, 1},
    {OPERATION_FORWARD, 704, DESCRIPTOR, 1},
    {OPERATION_FORWARD, 705, DESCRIPTOR, 1},
    {OPERATION_DATA, 706, FLOAT, 1},
    {OPERATION_DATA, 707, FLOAT, 1},
    {OPERATION_DATA, 708, DESCRIPTOR, 1},
    {OPERATION_DATA, 709, DESCRIPTOR, 1},
    {OPERATION_DATA, 710, DESCRIPTOR, 1},
    {OPERATION_DATA, 711, DESCRIPTOR, 1},
    {OPERATION_FILTER, 712, FLOAT, 1},
    {OPERATION_FILTER, 713, FLOAT, 1},
    {OPERATION_FILTER, 714, DESCRIPTOR, 1},
    {OPERATION_FILTER, 715, DESCRIPTOR, 1},
    {OPERATION_FILTER, 716, DESCRIPTOR, 1},
    {OPERATION_FILTER, 717, DESCRIPTOR, 1},
    {OPERATION_POINTWISE, 750, DESCRIPTOR, 1},
    {OPERATION_POINTWISE, 751, DESCRIPTOR, 1},
    {OPERATION_POINTWISE, 752, DESCRIPTOR, 1},
    {OPERATION_POINTWISE, 753, DESCRIPTOR, 1},
    {GRAPH, 800, HANDLE, 1},
    {GRAPH, 801, DESCRIPTOR, 0},
    {HEURISTIC, 200, HEURISTIC_MODE, 1},
    {HEURISTIC, 201, DESCRIPTOR, 1},
    {PLAN, 400, HANDLE, 1},
    {PLAN, 401, DESCRIPTOR, 1},
    {PACK, 1000, INT64, 0},
    {PACK, 1001, POINTER, 0},
    {PACK, 1003, POINTER, 1},
};

// Engines. The first two are to be passed over; the third needs a workspace, sums in F32, and takes longer than the heuristic
// expects.
enum Engine { NONDETERMINISTIC, WINOGRAD, SINGLE, EXACT };
constexpr long long LONGER = 1'000'000'000; // nanoseconds

// Where a tensor of a graph is.
struct Place {
    int64_t id = 0, alignment = 1;
};

struct Problem {
    Task task;
    Place x, w, y, bias;
    bool has_bias = false;
};

struct Descriptor {
    int kind;
    bool finished = false;
    std::map<int, std::vector<char>> attributes = {};
    Problem problem = {}; // of graphs and what is made of them
    int engine = -1;

    template <class T> std::vector<T> all(int name) const {
        auto found = attributes.find(name);
        std::vector<T> values(found == attributes.end() ? 0 : found->second.size() / sizeof(T));
        if (!values.empty())
            memcpy(values.data(), found->second.data(), values.size() * sizeof(T));
        return values;
    }
    template <class T> T one(int name) const { return all<T>(name).at(0); }
};

std::mutex lock;
std::set<const Descriptor *> alive;

bool lives(const Descriptor *descriptor) {
    std::lock_guard<std::mutex> held(lock);
    return alive.count(descriptor);
}

int wrong(const char *what) { return complain(DNN_BAD_PARAM, "cuDNN graph: %s", what); }

// A finished descriptor of a kind that an attribute names.
const Descriptor *part(const Descriptor &of, int name, int kind) {
    auto *found = of.one<const Descriptor *>(name);
    return lives(found) && found->kind == kind && found->finished ? found : nullptr;
}

int describe(const Descriptor *descriptor, Tensor &tensor, Place &place) {
    if (!descriptor)
        return wrong("an operation names what is not a finished tensor");
    auto sizes = descriptor->all<int64_t>(902), strides = descriptor->all<int64_t>(903);
    if (sizes.size() != strides.size() || sizes.size() > MAX)
        return wrong("sizes and strides differ in number");
    std::vector<int> size(sizes.begin(), sizes.end()), stride(strides.begin(), strides.end());
    place = {descriptor->one<int64_t>(906), descriptor->one<int64_t>(900)};
    return set(&tensor, descriptor->one<int>(901), int(size.size()), size.data(), stride.data());
}

int describe(const Descriptor *descriptor, Convolution &convolution, const Tensor &x, const Tensor &w) {
    if (!descriptor)
        return wrong("an operation names what is not a finished convolution");
    convolution.rank = int(descriptor->one<int64_t>(106));
    convolution.mode = descriptor->one<int>(101);
    convolution.compute = descriptor->one<int>(100);
    convolution.groups = x.size[1] / std::max(w.size[1], 1);
    auto dilation = descriptor->all<int64_t>(102), stride = descriptor->all<int64_t>(103),
         after = descriptor->all<int64_t>(104), before = descriptor->all<int64_t>(105);
    size_t rank = convolution.rank;
    if (dilation.size() != rank || stride.size() != rank || before.size() != rank || after != before)
        return wrong("a convolution's numbers are not one a dimension, or its paddings differ");
    for (size_t i = 0; i < rank; i++) {
        convolution.padding[i] = int(before[i]);
        convolution.stride[i] = int(stride[i]);
        convolution.dilation[i] = int(dilation[i]);
    }
    return convolution.compute == 0 ? DNN_SUCCESS : wrong("sums are not in F32");
}

// What a graph computes.
int solve(Descriptor &graph) {
    Problem &problem = graph.problem;
    Task &task = problem.task;
    auto operations = graph.all<const Descriptor *>(801);
    if (operations.empty() || operations.size() > 2)
        return DNN_NOT_SUPPORTED;
    for (auto *operation : operations)
        if (!lives(operation) || !operation->finished)
            return wrong("an operation is not finished");
    const Descriptor &first = *operations[0];
    int names[6]; // alpha, beta, convolution, then x, w and y
    switch (first.kind) {
    case OPERATION_FORWARD:
        task.pass = FORWARD;
        memcpy(names, (const int[]){700, 701, 702, 704, 703, 705}, sizeof names);
        break;
    case OPERATION_DATA:
        task.pass = DATA;
        memcpy(names, (const int[]){706, 707, 708, 710, 709, 711}, sizeof names);
        break;
    case OPERATION_FILTER:
        task.pass = FILTER;
        memcpy(names, (const int[]){712, 713, 714, 716, 715, 717}, sizeof names);
        break;
    default:
        return DNN_NOT_SUPPORTED;
    }
    const Descriptor *tensors[] = {part(first, names[3], TENSOR), part(first, names[4], TENSOR),
                                   part(first, names[5], TENSOR)};
    for (int status : {describe(tensors[0], task.x, problem.x), describe(tensors[1], task.w, problem.w),
                       describe(tensors[2], task.y, problem.y)})
        if (status)
            return status;
    if (int status = describe(part(first, names[2], CONVOLUTION), task.convolution, task.x, task.w))
        return status;
    task.alpha = first.one<float>(names[0]), task.beta = first.one<float>(names[1]);
    if (!fit(task.x, task.w, task.convolution, task.y))
        return wrong("tensors do not fit their convolution");
    const int result = task.pass == FORWARD ? 2 : task.pass == DATA ? 0 : 1;
    for (int i = 0; i < 3; i++)
        if (bool(tensors[i]->one<char>(907)) != (i == result && operations.size() == 2))
            return wrong("a tensor that has no memory is read or written, or one that has is in between");
    if (operations.size() == 1)
        return DNN_SUCCESS;

    const Descriptor &second = *operations[1];
    if (second.kind != OPERATION_POINTWISE)
        return DNN_NOT_SUPPORTED;
    const Descriptor *add = part(second, 750, POINTWISE);
    if (!add || add->one<int>(0) != 0 || add->one<int>(1) != 0)
        return wrong("what follows a convolution is no addition in F32");
    if (part(second, 751, TENSOR) != tensors[result])
        return wrong("what is added to is not the convolution's result");
    Tensor &sums = result == 2 ? task.y : task.x, bias, added;
    if (sums.type != R_32F)
        return wrong("sums are rounded before the bias is added");
    Place place;
    if (int status = describe(part(second, 752, TENSOR), bias, problem.bias))
        return status;
    if (int status = describe(part(second, 753, TENSOR), added, place))
        return status;
    if (bias.count() != size_t(sums.size[1]) || bias.size[1] != sums.size[1] ||
        !std::equal(sums.size, sums.size + sums.rank, added.size))
        return wrong("the bias, or the result, has other sizes than the sums");
    (result == 2 ? problem.y : problem.x) = place;
    sums = added;
    problem.has_bias = true;
    task.bias_type = bias.type;
    return DNN_SUCCESS;
}

// Engines by a heuristic's mode: A, or what is left.
std::vector<int> engines(int mode) {
    if (mode == 3)
        return {NONDETERMINISTIC, WINOGRAD, SINGLE, EXACT};
    return {EXACT};
}

std::vector<int> notes(int engine) {
    switch (engine) {
    case NONDETERMINISTIC:
        return {0, 4};
    case WINOGRAD:
        return {0, 5};
    case SINGLE:
        return {0};
    default:
        return {};
    }
}

template <class T> int give(const std::vector<T> &values, int64_t room, int64_t *count, void *to) {
    *count = int64_t(values.size());
    memcpy(to, values.data(), std::min(size_t(room), values.size()) * sizeof(T));
    return DNN_SUCCESS;
}

} // namespace

extern "C" {

int cudnnBackendCreateDescriptor(int kind, Descriptor **descriptor) {
    *descriptor = new Descriptor{kind};
    std::lock_guard<std::mutex> held(lock);
    alive.insert(*descriptor);
    return DNN_SUCCESS;
}
int cudnnBackendDestroyDescriptor(Descriptor *descriptor) {
    std::lock_guard<std::mutex> held(lock);
    if (!alive.erase(descriptor))
        return wrong("destroys what is no descriptor");
    delete descriptor;
    return DNN_SUCCESS;
}

int cudnnBackendSetAttribute(Descriptor *descriptor, int name, int type, int64_t count, const void *values) {
    if (!lives(descriptor) || descriptor->finished)
        return wrong("sets an attribute of a finished descriptor, or of none");
    auto rule = std::find_if(std::begin(RULES), std::end(RULES),
                             [&](const Rule &rule) { return rule.kind == descriptor->kind && rule.name == name; });
    if (rule == std::end(RULES) || rule->type != type || (rule->count && rule->count != count))
        return complain(DNN_BAD_PARAM, "cuDNN graph: descriptor %d has no attribute %d of %ld values of type %d",
                        descriptor->kind, name, long(count), type);
    auto *bytes = static_cast<const char *>(values);
    descriptor->attributes[name].assign(bytes, bytes + count * width(type));
    return DNN_SUCCESS;
}

int cudnnBackendFinalize(Descriptor *descriptor) {
    if (!lives(descriptor) || descriptor->finished)
        return wrong("finishes a finished descriptor, or none");
    for (const Rule &rule : RULES)
        if (rule.kind == descriptor->kind && !descriptor->attributes.count(rule.name))
            return complain(DNN_BAD_PARAM, "cuDNN graph: descriptor %d lacks attribute %d", rule.kind, rule.name);
    int status = DNN_SUCCESS;
    switch (descriptor->kind) {
    case GRAPH:
        status = solve(*descriptor);
        break;
    case HEURISTIC:
        if (auto *graph = part(*descriptor, 201, GRAPH))
            descriptor->problem = graph->problem;
        else
            status = wrong("a heuristic has no finished graph");
        break;
    case PLAN:
        if (auto *chosen = part(*descriptor, 401, CONFIGURATION))
            descriptor->problem = chosen->problem, descriptor->engine = chosen->engine;
        else
            status = wrong("a plan has no finished configuration");
        break;
    case PACK:
        if (descriptor->attributes[1000].size() != descriptor->attributes[1001].size())
            status = wrong("a pack has more ids than addresses, or fewer");
        break;
    default:
        break;
    }
    const bool may_refuse = descriptor->kind == GRAPH || descriptor->kind == HEURISTIC || descriptor->kind == PLAN;
    if (!status && may_refuse)
        status = refusal_of_graph();
    descriptor->finished = !status;
    return status;
}

int cudnnBackendGetAttribute(Descriptor *descriptor, int name, int type, int64_t room, int64_t *count, void *values) {
    if (!lives(descriptor) || !descriptor->finished)
        return wrong("reads an attribute of an unfinished descriptor, or of none");
    auto fill = [&](int kind, const std::vector<int> &numbers) {
        if (type != DESCRIPTOR)
            return wrong("reads descriptors as something else");
        auto **given = static_cast<Descriptor **>(values);
        *count = std::min(room, int64_t(numbers.size()));
        for (int64_t i = 0; i < *count; i++) {
            if (!lives(given[i]) || given[i]->kind != kind)
                return wrong("gives no room for a descriptor");
            given[i]->finished = true;
            given[i]->problem = descriptor->problem;
            given[i]->engine = numbers[i];
        }
        return int(DNN_SUCCESS);
    };
    switch (name) {
    case 202:
        return fill(CONFIGURATION, engines(descriptor->one<int>(200)));
    case 300:
        return fill(ENGINE, {descriptor->engine});
    case 402:
        return type == INT64 ? give<int64_t>({descriptor->engine == SINGLE ? int64_t(WORKSPACE) : 0}, room, count, values)
                             : wrong("reads a size as something else");
    case 1301:
        return type == INT64 ? give<int64_t>({descriptor->engine}, room, count, values)
                             : wrong("reads an index as something else");
    case 1303:
        return type == NOTE ? give(notes(descriptor->engine), room, count, values)
                            : wrong("reads notes as something else");
    default:
        return complain(DNN_BAD_PARAM, "cuDNN graph: attribute %d is not implemented", name);
    }
}

int cudnnBackendExecute(Handle *handle, Descriptor *plan, Descriptor *pack) {
    if (!handle)
        return DNN_NOT_INITIALIZED;
    if (!lives(plan) || plan->kind != PLAN || !plan->finished || !lives(pack) || pack->kind != PACK || !pack->finished)
        return wrong("executes what is no plan, or not finished");
    if (plan->one<Handle *>(400) != handle)
        return wrong("executes another handle's plan");
    if (plan->engine < SINGLE)
        return complain(DNN_EXECUTION_FAILED, "cuDNN graph: engine %d transforms, or is not deterministic",
                        plan->engine);
    if (plan->engine == EXACT && refuses_exact_engine())
        return DNN_EXECUTION_FAILED;
    if (int status = refusal_of_graph())
        return status;
    auto ids = pack->all<int64_t>(1000);
    auto pointers = pack->all<char *>(1001);
    const Problem &problem = plan->problem;
    Task task = problem.task;
    auto find = [&](const Place &place) -> char * {
        auto at = std::find(ids.begin(), ids.end(), place.id);
        char *found = at == ids.end() ? nullptr : pointers[at - ids.begin()];
        return size_t(found) % place.alignment ? nullptr : found;
    };
    char *x = find(problem.x), *w = find(problem.w), *y = find(problem.y);
    if (!x || !w || !y)
        return wrong("a tensor has no address, or one that is not a multiple of its alignment");
    task.a = task.pass == DATA ? w : x;
    task.b = task.pass == FORWARD ? w : y;
    task.to = task.pass == FORWARD ? y : task.pass == DATA ? x : w;
    task.single = plan->engine == SINGLE;
    if (problem.has_bias && !(task.bias = find(problem.bias)))
        return wrong("the bias has no address");
    auto *workspace = pack->one<void *>(1003);
    size_t needed = plan->engine == SINGLE ? WORKSPACE : 0;
    if (plan->engine == SINGLE && !capturing(handle->stream))
        spend(LONGER);
    return launch(handle->stream, "cudnnBackendExecute", task, needed, workspace, needed);
}
}

} // namespace emulated::dnn
