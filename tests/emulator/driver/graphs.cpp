// Captures and the graphs they become: lists of work, done in the order it was recorded in.
#include "streams.hpp"

namespace emulated {
namespace {

struct Executable {
    std::shared_ptr<Graph> graph;
    bool frees_on_launch;
};

// The memory of all graphs there are, by its address.
std::map<void *, GraphMemory *> &all_memory() {
    static auto &all = *new std::map<void *, GraphMemory *>;
    return all;
}

void set_live(GraphMemory &memory, bool live) {
    memory.live = live;
    memory::accessible(memory.start, live);
}

} // namespace

GraphMemory::~GraphMemory() {
    all_memory().erase(start);
    if (!live) // else it is an allocation like any other from now on
        memory::release(start);
}

int allocate_in_capture(void *handle, size_t size, void **result) {
    std::lock_guard guard(device_lock());
    Capture &capture = *stream_of(handle)->capture;
    if (capture.invalid)
        return CAPTURE_INVALIDATED;
    void *start = memory::allocate(size);
    if (!start)
        return OUT_OF_MEMORY;
    auto memory = std::make_shared<GraphMemory>();
    memory->start = start;
    set_live(*memory, false);
    all_memory()[start] = memory.get();
    capture.graph->memory[start] = {memory, false};
    *result = start;
    return submit(handle, "cuMemAllocAsync", [memory = memory.get()] {
        set_live(*memory, true);
        return SUCCESS;
    });
}

int release_in_capture(void *handle, void *start) {
    std::lock_guard guard(device_lock());
    Capture &capture = *stream_of(handle)->capture;
    if (capture.invalid)
        return CAPTURE_INVALIDATED;
    auto found = capture.graph->memory.find(start);
    if (found == capture.graph->memory.end() || found->second.second)
        return complain(INVALID_VALUE, "cuMemFreeAsync in a capture, of memory that was not allocated in it");
    found->second.second = true;
    return submit(handle, "cuMemFreeAsync", [memory = found->second.first.get()] {
        set_live(*memory, false);
        return SUCCESS;
    });
}

bool release_of_graph(void *start, int &error) {
    std::lock_guard guard(device_lock());
    auto found = all_memory().find(start);
    if (found == all_memory().end())
        return false;
    error = SUCCESS;
    if (found->second->live)
        set_live(*found->second, false);
    else
        error = complain(INVALID_VALUE, "memory of a graph that has not run is freed");
    return true;
}

extern "C" {

int cuStreamBeginCapture_v2(void *handle, int mode) {
    CHECK_STICKY();
    static unsigned long long ids = 0;
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    if (!stream)
        return INVALID_HANDLE;
    if (stream->legacy)
        return complain(CAPTURE_UNSUPPORTED, "the legacy stream cannot be captured");
    if (stream->capture)
        return complain(INVALID_VALUE, "the stream is being captured already");
    stream->capture = std::make_shared<Capture>();
    stream->capture->origin = stream;
    stream->capture->mode = static_cast<Mode>(mode);
    stream->capture->thread = std::this_thread::get_id();
    stream->capture->id = ++ids;
    captures().insert(stream->capture.get());
    return SUCCESS;
}
int cuStreamEndCapture(void *handle, void **graph) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    if (graph)
        *graph = nullptr;
    if (!stream)
        return INVALID_HANDLE;
    if (!stream->capture || stream->capture->origin != stream)
        return complain(stream->capture ? CAPTURE_UNMATCHED : INVALID_VALUE,
                        "the stream's capture did not begin in it");
    if (stream->capture->mode != RELAXED && stream->capture->thread != std::this_thread::get_id())
        return CAPTURE_WRONG_THREAD;
    auto capture = stream->capture;
    captures().erase(capture.get());
    stream->capture = nullptr;
    bool joined = true;
    for (auto &[other, waited] : capture->others) {
        other->capture = nullptr;
        joined &= waited;
    }
    if (capture->invalid)
        return CAPTURE_INVALIDATED;
    if (!joined)
        return complain(CAPTURE_UNJOINED, "what another stream did for the capture was not waited for");
    *graph = new std::shared_ptr<Graph>(capture->graph);
    return SUCCESS;
}
int cuStreamIsCapturing(void *handle, int *status) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    if (!stream)
        return INVALID_HANDLE;
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return SUCCESS;
}
int cuStreamGetCaptureInfo_v2(void *handle, int *status, unsigned long long *id, void **graph, const void **,
                              size_t *) {
    int error = cuStreamIsCapturing(handle, status);
    if (!error && id && *status)
        *id = stream_of(handle)->capture->id;
    if (graph)
        *graph = nullptr;
    return error;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
    return complain(NOT_SUPPORTED, "cuThreadExchangeStreamCaptureMode(%d) is not implemented", *mode);
}

int cuGraphInstantiateWithFlags(void **result, void *graph, unsigned long long flags) {
    CHECK_STICKY();
    if (!graph)
        return INVALID_VALUE;
    std::lock_guard guard(device_lock());
    *result = new Executable{*static_cast<std::shared_ptr<Graph> *>(graph), (flags & 1) != 0};
    return SUCCESS;
}
int cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
    if (nodes)
        return complain(NOT_SUPPORTED, "cuGraphGetNodes gives only their number");
    *count = (*static_cast<std::shared_ptr<Graph> *>(graph))->nodes.size();
    return SUCCESS;
}
int cuGraphDestroy(void *graph) {
    std::lock_guard guard(device_lock());
    delete static_cast<std::shared_ptr<Graph> *>(graph);
    return SUCCESS;
}
int cuGraphExecDestroy(void *executable) {
    std::lock_guard guard(device_lock());
    delete static_cast<Executable *>(executable);
    return SUCCESS;
}
int cuGraphUpload(void *, void *) { return sticky; }
int cuGraphLaunch(void *handle, void *stream) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    auto executable = static_cast<Executable *>(handle);
    if (!executable)
        return INVALID_VALUE;
    if (int error = finish(stream))
        return error;
    for (auto &[start, memory] : executable->graph->memory)
        if (memory.first->live) {
            if (!executable->frees_on_launch)
                return complain(INVALID_VALUE, "a graph is launched again before what it allocated is freed");
            set_live(*memory.first, false);
        }
    auto graph = executable->graph;
    return submit(stream, "cuGraphLaunch", [graph] {
        for (const Node &node : graph->nodes)
            if (int error = node.work())
                return error;
        return int(SUCCESS);
    });
}
}

} // namespace emulated
