// Streams and events. What a stream is given to do is done at once, unless it is being captured, delayed, or blocked.
#include "streams.hpp"

#include <chrono>
#include <cstdlib>
#include <ctime>
#include <random>

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
    static Stream &stream = *new Stream;
    stream.legacy = true;
    return stream;
}

// Those that threads have by themselves: never destroyed, as what they were given may outlast the thread.
std::set<Stream *> &of_threads() {
    static auto &all = *new std::set<Stream *>;
    return all;
}

Stream *of_this_thread() {
    thread_local Stream *const stream = [] {
        std::lock_guard guard(device_lock());
        return *of_threads().insert(new Stream).first;
    }();
    return stream;
}

// Does what a stream was given first, until it has done so much, or is blocked.
int advance(Stream &stream, unsigned long long until) {
    while (stream.begun < until && !stream.pending.empty() && !stream.busy) {
        stream.busy = true;
        int error = stream.pending.front()();
        stream.busy = false;
        if (error == BLOCKED)
            return BLOCKED;
        stream.pending.pop_front();
        stream.begun++;
        if (error && !sticky) // whose call has returned
            sticky = error;
    }
    return sticky;
}

// Calls `attempt` until it is not blocked any more. Others come in between, if the caller does not hold the lock.
template <class F> int until_done(F attempt) {
    for (;;) {
        {
            std::lock_guard guard(device_lock());
            int error = attempt();
            if (error != BLOCKED)
                return error;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

template <class F> void each_stream(F f) {
    for (Stream *stream : of_threads())
        f(*stream);
    for (Stream *stream : streams())
        f(*stream);
}

int advance_all() {
    bool blocked = false;
    each_stream([&](Stream &stream) { blocked |= advance(stream, stream.given) == BLOCKED; });
    return sticky ? sticky : blocked ? BLOCKED : int(SUCCESS);
}

unsigned chance() {
    static std::minstd_rand numbers(strtoul(getenv("EMULATED_GPU_DELAY"), nullptr, 0));
    return numbers();
}

void push(Stream &stream, Work work) {
    stream.pending.push_back(std::move(work));
    stream.given++;
}

// At once, unless the stream is blocked, or becomes so.
int at_once(Stream &stream, Work work) {
    if (int error = advance(stream, stream.given); error && error != BLOCKED)
        return error;
    if (stream.pending.empty())
        if (int error = work(); error != BLOCKED)
            return error;
    push(stream, std::move(work));
    return SUCCESS;
}

int delay(Stream &stream, Work work) {
    push(stream, std::move(work));
    constexpr size_t MOST = 1000;
    if (stream.pending.size() > MOST)
        advance(stream, stream.begun + MOST / 2);
    if (chance() % 32 == 0) { // some other stream comes first
        std::vector<Stream *> all;
        each_stream([&](Stream &other) { all.push_back(&other); });
        Stream &other = *all[chance() % all.size()];
        advance(other, other.begun + chance() % 32);
    }
    return sticky;
}

long long now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// What events count beside the host's time.
long long spent = 0;

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

bool delayed() {
    static const bool yes = getenv("EMULATED_GPU_DELAY") && *getenv("EMULATED_GPU_DELAY");
    return yes;
}

bool behind(void *handle) {
    std::lock_guard guard(device_lock());
    Stream *stream = stream_of(handle);
    return delayed() || (stream && !stream->pending.empty());
}

int finish(void *handle) {
    return until_done([=] {
        Stream *stream = stream_of(handle);
        return stream && !stream->legacy ? advance(*stream, stream->given) : advance_all();
    });
}

int finish_all() { return until_done(advance_all); }

Stream *stream_of(void *handle) {
    auto number = reinterpret_cast<size_t>(handle);
    if (number < 2)
        return &legacy();
    if (number == 2)
        return of_this_thread();
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
    if (!stream->capture) {
        if (idle() && !moves)
            return SUCCESS;
        if (!stream->legacy)
            return delayed() ? delay(*stream, std::move(work)) : at_once(*stream, std::move(work));
        each_stream([](Stream &other) { // which wait for it, and it for them
            if (other.blocking)
                advance(other, other.given);
        });
        return sticky ? sticky : work();
    }
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

void spend(long long nanoseconds) {
    std::lock_guard guard(device_lock());
    spent += nanoseconds;
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
    if (!streams().count(stream))
        return INVALID_HANDLE;
    advance(*stream, stream->given);
    streams().erase(stream); // but not deleted: somebody may still wait for its events
    if (stream->capture && stream->capture->origin == stream)
        captures().erase(stream->capture.get());
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
    {
        std::lock_guard guard(device_lock());
        Stream *stream = stream_of(handle);
        if (!stream)
            return INVALID_HANDLE;
        if (stream->capture)
            return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "cuStreamSynchronize of a stream being captured");
        if (stream->legacy)
            if (int error = implicit("cuStreamSynchronize of the legacy stream"))
                return error;
    }
    int error = finish(handle);
    memory::synchronised();
    return error;
}
int cuStreamQuery(void *handle) { return cuStreamSynchronize(handle); }
int cuCtxSynchronize() {
    CHECK_STICKY();
    {
        std::lock_guard guard(device_lock());
        int error = SUCCESS;
        for (Capture *capture : captures())
            error = invalidate(*capture, CAPTURE_UNSUPPORTED, "cuCtxSynchronize");
        if (error)
            return error;
    }
    int error = finish_all();
    memory::synchronised();
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
    event->nanoseconds = now() + spent;
    event->stream = stream;
    event->after = stream->given;
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
    if (int error = not_while_capturing("cuEventQuery or cuEventSynchronize"))
        return error;
    int error = event->stream ? advance(*event->stream, event->after) : SUCCESS;
    return error == BLOCKED ? NOT_READY : error;
}
int cuEventSynchronize(void *handle) {
    return until_done([=] {
        int error = cuEventQuery(handle);
        return error == NOT_READY ? BLOCKED : error;
    });
}
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
    if (!event->captured) {
        if (!event->stream || event->stream->legacy)
            return SUCCESS;
        auto waits = [of = event->stream, after = event->after] { return advance(*of, after); };
        return delayed() ? delay(*stream, waits) : at_once(*stream, waits);
    }
    if (!capture)
        return complain(CAPTURED_EVENT, "cuStreamWaitEvent for an event of a capture that has ended");
    stream->capture = capture; // which it thereby becomes a part of
    capture->others[stream] = false;
    return SUCCESS;
}
}

} // namespace emulated
