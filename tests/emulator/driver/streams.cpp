// Streams and events. What a stream is given to do is done at once, unless it is being captured.
#include "streams.hpp"

#include <ctime>

namespace emulated {
namespace {

std::set<Stream *> &streams() {
    static auto &all = *new std::set<Stream *>;
    return all;
}

std::set<Event *> &events() {
    static auto &all = *new std::set<Event *>;
    return all;
}

Stream &legacy() {
    static Stream &stream = *new Stream{true, true, 0, nullptr};
    return stream;
}

long long now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// What a stream's capture does not survive.
int invalidate(Capture &capture, int error, const char *name) {
    capture.invalid = true;
    return complain(error, "%s, which a capture does not allow", name);
}

// The legacy stream would have to wait for streams that block with it.
int implicit(const char *name) {
    for (Capture *capture : captures())
        if (capture->origin->blocking && capture->mode != RELAXED)
            return invalidate(*capture, CAPTURE_IMPLICIT, name);
    return SUCCESS;
}

} // namespace

std::set<Capture *> &captures() {
    static auto &all = *new std::set<Capture *>;
    return all;
}

Stream *stream_of(void *handle) {
    thread_local Stream of_thread;
    auto number = reinterpret_cast<size_t>(handle);
    if (number < 2)
        return &legacy();
    if (number == 2)
        return &of_thread;
    auto stream = static_cast<Stream *>(handle);
    return streams().count(stream) ? stream : nullptr;
}

int submit(void *handle, const char *what, Work work, bool moves) {
    count(what);
    if (sticky)
        return sticky;
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    if (!stream)
        return complain(INVALID_HANDLE, "%s in a stream that does not exist", what);
    if (stream->legacy)
        if (int error = implicit(what))
            return error;
    if (!stream->capture)
        return idle() && !moves ? int(SUCCESS) : work();
    Capture &capture = *stream->capture;
    if (capture.invalid)
        return CAPTURE_INVALIDATED;
    capture.graph->nodes.push_back({what, std::move(work)});
    if (stream != capture.origin)
        capture.others[stream] = false;
    return SUCCESS;
}

bool capturing(void *handle) {
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    return stream && stream->capture;
}

int not_while_capturing(const char *name) {
    std::lock_guard guard(device_lock());
    int error = SUCCESS;
    for (Capture *capture : captures())
        if (capture->mode == GLOBAL || (capture->mode == THREAD_LOCAL && capture->thread == std::this_thread::get_id()))
            error = invalidate(*capture, CAPTURE_UNSUPPORTED, name);
    return error;
}

extern "C" {

int cuStreamCreate(void **result, unsigned flags) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    auto stream = new Stream;
    stream->blocking = !(flags & 1);
    streams().insert(stream);
    *result = stream;
    return SUCCESS;
}
int cuStreamCreateWithPriority(void **result, unsigned flags, int priority) {
    int error = cuStreamCreate(result, flags);
    if (!error)
        static_cast<Stream *>(*result)->priority = priority;
    return error;
}
int cuStreamDestroy_v2(void *handle) {
    std::lock_guard guard(device_lock());
    auto stream = static_cast<Stream *>(handle);
    if (!streams().erase(stream))
        return INVALID_HANDLE;
    if (stream->capture && stream->capture->origin == stream)
        captures().erase(stream->capture.get());
    delete stream;
    return SUCCESS;
}
int cuStreamGetPriority(void *handle, int *priority) {
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    *priority = stream ? stream->priority : 0;
    return stream ? SUCCESS : INVALID_HANDLE;
}
int cuStreamGetFlags(void *handle, unsigned *flags) {
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    *flags = stream && !stream->blocking;
    return stream ? SUCCESS : INVALID_HANDLE;
}
int cuStreamGetCtx(void *, void **context) {
    extern int cuDevicePrimaryCtxRetain(void **, int);
    return cuDevicePrimaryCtxRetain(context, 0);
}
int cuStreamSynchronize(void *handle) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    if (!stream)
        return INVALID_HANDLE;
    if (stream->capture)
        return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "cuStreamSynchronize of a stream being captured");
    return stream->legacy ? implicit("cuStreamSynchronize of the legacy stream") : SUCCESS;
}
int cuStreamQuery(void *handle) { return cuStreamSynchronize(handle); }
int cuCtxSynchronize() {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    int error = SUCCESS;
    for (Capture *capture : captures())
        error = invalidate(*capture, CAPTURE_UNSUPPORTED, "cuCtxSynchronize");
    return error;
}
int cuStreamAttachMemAsync() { return SUCCESS; }
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    return submit(stream, "cuLaunchHostFunc", [=] {
        function(data);
        return SUCCESS;
    });
}

int cuEventCreate(void **result, unsigned flags) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    auto event = new Event;
    event->timed = !(flags & 2);
    events().insert(event);
    *result = event;
    return SUCCESS;
}
int cuEventDestroy_v2(void *handle) {
    count(__func__);
    std::lock_guard guard(device_lock());
    if (!events().erase(static_cast<Event *>(handle)))
        return INVALID_HANDLE;
    delete static_cast<Event *>(handle);
    return SUCCESS;
}
int cuEventRecord(void *handle, void *in) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    auto event = static_cast<Event *>(handle);
    Stream *stream = stream_of(in);
    if (!stream || !events().count(event))
        return INVALID_HANDLE;
    if (stream->legacy)
        if (int error = implicit("cuEventRecord"))
            return error;
    event->recorded = true;
    event->nanoseconds = now();
    event->stream = stream;
    event->capture = stream->capture;
    event->captured = stream->capture != nullptr;
    return stream->capture && stream->capture->invalid ? CAPTURE_INVALIDATED : SUCCESS;
}
int cuEventRecordWithFlags(void *event, void *stream, unsigned) { return cuEventRecord(event, stream); }
int cuEventQuery(void *handle) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    auto event = static_cast<Event *>(handle);
    if (!events().count(event))
        return INVALID_HANDLE;
    if (event->captured) {
        if (auto capture = event->capture.lock())
            capture->invalid = true;
        return CAPTURED_EVENT;
    }
    return not_while_capturing("cuEventQuery or cuEventSynchronize");
}
int cuEventSynchronize(void *handle) { return cuEventQuery(handle); }
int cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    auto first = static_cast<Event *>(start), last = static_cast<Event *>(end);
    if (!events().count(first) || !events().count(last) || !first->timed || !last->timed || !first->recorded ||
        !last->recorded)
        return INVALID_HANDLE;
    if (first->captured || last->captured)
        return CAPTURED_EVENT;
    *milliseconds = (last->nanoseconds - first->nanoseconds) * 1e-6f;
    return SUCCESS;
}
int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}
int cuStreamWaitEvent(void *handle, void *which, unsigned) {
    CHECK_STICKY();
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    auto event = static_cast<Event *>(which);
    if (!stream || !events().count(event))
        return INVALID_HANDLE;
    if (stream->legacy)
        if (int error = implicit("cuStreamWaitEvent"))
            return error;
    auto capture = event->capture.lock();
    if (stream->capture) {
        if (stream->capture->invalid)
            return CAPTURE_INVALIDATED;
        if (!event->recorded)
            return SUCCESS;
        if (capture != stream->capture)
            return invalidate(*stream->capture, CAPTURE_ISOLATION,
                              "cuStreamWaitEvent for an event that was recorded outside of it");
        if (capture->others.count(event->stream))
            capture->others[event->stream] = true;
        return SUCCESS;
    }
    if (!event->captured)
        return SUCCESS;
    if (!capture)
        return complain(CAPTURED_EVENT, "cuStreamWaitEvent for an event of a capture that has ended");
    stream->capture = capture; // which it thereby becomes a part of
    capture->others[stream] = false;
    return SUCCESS;
}
}

} // namespace emulated
