#pragma once
#include <deque>
#include <map>
#include <set>
#include <thread>

#include "driver.hpp"

namespace emulated {

struct Node {
    const char *what;
    Work work;
};

// Memory that a graph allocates: at an address that stays its own, and touchable while it is allocated.
struct GraphMemory {
    void *start;
    bool live = false;
    ~GraphMemory();
};

struct Graph {
    std::vector<Node> nodes;
    // What it allocates, and whether it frees that itself.
    std::map<void *, std::pair<std::shared_ptr<GraphMemory>, bool>> memory;
};

enum Mode { GLOBAL, THREAD_LOCAL, RELAXED };

struct Stream;

struct Capture {
    Stream *origin;
    Mode mode;
    std::thread::id thread;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    bool invalid = false;
    unsigned long long id;
    // Streams that were made to wait for it, and whether what they did was waited for.
    std::map<Stream *, bool> others;
};

struct Stream {
    bool blocking = true, legacy = false;
    int priority = 0;
    std::shared_ptr<Capture> capture;
    // What it has yet to do, and how much it has begun, and was ever given.
    std::deque<Work> pending;
    unsigned long long begun = 0, given = 0;
    // Whether the first of that is being done.
    bool busy = false;
};

struct Event {
    bool timed = true, recorded = false;
    long long nanoseconds = 0;
    // Of the capture that it was last recorded in, and there in which stream.
    std::weak_ptr<Capture> capture;
    Stream *stream = nullptr;
    bool captured = false;
    // How much its stream had been given.
    unsigned long long after = 0;
};

// Null where there is no such stream.
Stream *stream_of(void *handle);
// Of all streams that are being captured.
std::set<Capture *> &captures();

} // namespace emulated
