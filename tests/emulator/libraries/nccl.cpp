// libnccl: ranks that are threads of one process.
//
// What a rank starts is work of its stream, which is blocked until the peers' streams have come as far. What does not
// fit together never ends, as on a GPU at worst. NCCL's own reductions are missing.
//
// A communicator that does not block gives its work to the stream in the background: here when it is asked the second
// time whether it has.
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>

#include "../driver/driver.hpp"

namespace emulated {
namespace {

enum Result {
    OK = 0,
    UNHANDLED_CUDA = 1,
    INTERNAL = 3,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE = 6,
    IN_PROGRESS = 7,
};

struct Id {
    char bytes[128];
};

// What the user's program asks for, as far as this library knows it.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

using Bytes = std::vector<char>;

// One collective call of all ranks.
struct Meeting {
    std::vector<Bytes> brought;
    std::vector<std::string> calls;
    int came = 0, gone = 0;
};

// The ranks of one id.
struct Ranks {
    explicit Ranks(int size) : joined(size) {}
    std::vector<bool> joined;
    int came = 0;
    std::map<unsigned long long, Meeting> meetings;
    // What was sent and not received, by sender and receiver.
    std::map<std::pair<int, int>, std::deque<Bytes>> sent;
};

// Held where ranks are looked at; the device's lock, if any, was taken before.
std::mutex ranks_lock;
std::condition_variable &somebody_came = *new std::condition_variable;
// Never destroyed, as what is here for threads that outlive `main`.
auto &all_ranks = *new std::map<std::string, std::shared_ptr<Ranks>>;

struct Call {
    const char *name;
    Work work;
    void *stream;
};

struct Comm {
    std::shared_ptr<Ranks> ranks;
    int rank, size;
    bool blocks, finalized = false;
    // Whether what was started ends at once, undone.
    std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
    unsigned long long meetings = 0, launches = 0;
    // What is yet to be given to the stream, and how often somebody has asked since.
    std::vector<Call> waiting;
    int asked = 0;
    int error = OK;
    std::string why;
};

// EMULATED_NCCL_FAULT=rank:launch has that rank meet the error of a peer there.
bool is_faulty(const Comm &comm) {
    const char *fault = getenv("EMULATED_NCCL_FAULT");
    return fault && fault == std::to_string(comm.rank) + ":" + std::to_string(comm.launches);
}

thread_local std::string last_error;

int refuse(Comm *comm, int error, const std::string &why) {
    last_error = why;
    if (comm)
        comm->why = why;
    return error;
}

bool all_came(const Comm &comm) {
    std::lock_guard guard(ranks_lock);
    return comm.ranks->came == comm.size;
}

bool reaches(const void *start, size_t size) {
    if (memory::valid(start, size))
        return true;
    sticky = complain(ILLEGAL_ADDRESS, "NCCL moves %zu bytes: access %s", size,
                      memory::describe(static_cast<const char *>(start) + size - 1).c_str());
    return false;
}

// Messages to peers and from them, which make one launch.
struct Messages {
    struct One {
        void *at;
        size_t bytes;
        int peer;
    };
    std::vector<One> sends, receives;
    void *stream;
    bool were_sent = false;
};

int exchange(Comm comm, Messages &messages) {
    if (*comm.aborted)
        return SUCCESS;
    std::lock_guard guard(ranks_lock);
    auto &sent = comm.ranks->sent;
    if (!messages.were_sent)
        for (auto [at, bytes, peer] : messages.sends) {
            if (!reaches(at, bytes))
                return sticky;
            auto from = static_cast<char *>(at);
            sent[{comm.rank, peer}].emplace_back(from, from + bytes);
        }
    messages.were_sent = true;
    while (!messages.receives.empty()) {
        auto [at, bytes, peer] = messages.receives.front();
        auto &there = sent[{peer, comm.rank}];
        if (there.empty() || there.front().size() != bytes)
            return BLOCKED;
        if (!reaches(at, bytes))
            return sticky;
        memcpy(at, there.front().data(), bytes);
        there.pop_front();
        messages.receives.erase(messages.receives.begin());
    }
    return SUCCESS;
}

// A collective call: brings `bytes` at `from`, if any, and takes what `take` says when all have come.
template <class F>
Work meet(Comm *comm, const std::string &call, const void *from, size_t bytes, size_t to_bytes, void *to, F take) {
    auto number = comm->meetings++;
    auto came = std::make_shared<bool>(false);
    return [=, comm = *comm] {
        if (*comm.aborted)
            return int(SUCCESS);
        std::lock_guard guard(ranks_lock);
        Meeting &meeting = comm.ranks->meetings[number];
        if (!*came) {
            if (bytes && !reaches(from, bytes))
                return sticky;
            meeting.brought.resize(comm.size);
            meeting.calls.resize(comm.size);
            auto start = static_cast<const char *>(from);
            meeting.brought[comm.rank].assign(start, start + bytes);
            meeting.calls[comm.rank] = call;
            meeting.came++;
            *came = true;
        }
        if (meeting.came < comm.size)
            return BLOCKED;
        for (const std::string &theirs : meeting.calls)
            if (theirs != call)
                return BLOCKED; // for good
        if (!reaches(to, to_bytes))
            return sticky;
        take(meeting, static_cast<char *>(to));
        if (++meeting.gone == comm.size)
            comm.ranks->meetings.erase(number);
        return int(SUCCESS);
    };
}

// Whether the communicator takes another call.
int check(Comm *comm) {
    if (!comm)
        return refuse(comm, INVALID_ARGUMENT, "no communicator");
    if (comm->error)
        return comm->error;
    if (comm->finalized)
        return refuse(comm, INVALID_USAGE, "a call after ncclCommFinalize");
    if (!all_came(*comm) || !comm->waiting.empty())
        return refuse(comm, INVALID_USAGE, "a call before ncclCommGetAsyncError says that the last one is done");
    return OK;
}

int give(Comm *comm) {
    std::vector<Call> calls;
    calls.swap(comm->waiting);
    for (Call &call : calls) {
        if (is_faulty(*comm)) {
            call.work = [aborted = comm->aborted] { return *aborted ? int(SUCCESS) : BLOCKED; };
            comm->why = "connection closed by a peer";
            comm->error = REMOTE;
        }
        if (submit(call.stream, call.name, std::move(call.work)))
            comm->error = UNHANDLED_CUDA;
        comm->launches++;
    }
    return OK;
}

int launch(Comm *comm, Call call) {
    comm->waiting.push_back(std::move(call));
    comm->asked = 0;
    return comm->blocks ? give(comm) : int(IN_PROGRESS);
}

struct Group {
    int depth = 0;
    std::map<Comm *, Messages> messages;
};
thread_local Group group;

int start_messages(Comm *comm, Messages messages) {
    auto stream = messages.stream;
    auto shared = std::make_shared<Messages>(std::move(messages));
    return launch(comm, {"ncclSendRecv", [comm = *comm, shared] { return exchange(comm, *shared); }, stream});
}

int message(Comm *comm, void *at, size_t bytes, int peer, void *stream, bool sends) {
    if (int error = check(comm))
        return error;
    if (peer < 0 || peer >= comm->size)
        return refuse(comm, INVALID_ARGUMENT, "no rank " + std::to_string(peer));
    Messages alone;
    Messages &messages = group.depth ? group.messages[comm] : alone;
    messages.stream = stream;
    (sends ? messages.sends : messages.receives).push_back({at, bytes, peer});
    return group.depth ? int(OK) : start_messages(comm, std::move(alone));
}

size_t size_of(int type) {
    constexpr size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? SIZES[type] : 0;
}

} // namespace

extern "C" {

int ncclGetVersion(int *version) {
    *version = 22300;
    return OK;
}
int ncclGetUniqueId(Id *id) {
    std::random_device random;
    for (char &byte : id->bytes)
        byte = static_cast<char>(random());
    return OK;
}
const char *ncclGetErrorString(int result) {
    switch (result) {
    case OK:
        return "no error";
    case UNHANDLED_CUDA:
        return "unhandled cuda error";
    case INVALID_ARGUMENT:
        return "invalid argument";
    case INVALID_USAGE:
        return "invalid usage";
    case REMOTE:
        return "remote process exited or there was a network error";
    case IN_PROGRESS:
        return "NCCL operation in progress";
    default:
        return "internal error";
    }
}
const char *ncclGetLastError(Comm *comm) { return comm ? comm->why.c_str() : last_error.c_str(); }

int ncclCommInitRankConfig(Comm **result, int size, Id id, int rank, Config *config) {
    *result = nullptr;
    if (rank < 0 || rank >= size)
        return refuse(nullptr, INVALID_ARGUMENT, "no such rank");
    if (config && (config->magic != 0xcafebeef || config->size < sizeof(Config)))
        return refuse(nullptr, INVALID_ARGUMENT, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
    bool blocks = !config || config->blocking != 0;
    std::unique_lock guard(ranks_lock);
    auto &ranks = all_ranks[std::string(id.bytes, sizeof id.bytes)];
    if (!ranks)
        ranks = std::make_shared<Ranks>(size);
    if (ranks->joined.size() != static_cast<size_t>(size) || ranks->joined[rank])
        return refuse(nullptr, INVALID_USAGE, "ranks that differ in their number, or of one number");
    ranks->joined[rank] = true;
    ranks->came++;
    somebody_came.notify_all();
    *result = new Comm;
    (*result)->ranks = ranks;
    (*result)->rank = rank;
    (*result)->size = size;
    (*result)->blocks = blocks;
    if (blocks)
        somebody_came.wait(guard, [&ranks, size] { return ranks->came == size; });
    return blocks ? OK : IN_PROGRESS;
}
int ncclCommInitRank(Comm **result, int size, Id id, int rank) {
    return ncclCommInitRankConfig(result, size, id, rank, nullptr);
}
int ncclCommGetAsyncError(Comm *comm, int *error) {
    if (!comm)
        return refuse(comm, INVALID_ARGUMENT, "no communicator");
    if (comm->error) {
        *error = comm->error;
    } else if (!all_came(*comm) || comm->asked++ == 0) {
        *error = IN_PROGRESS;
    } else {
        give(comm);
        *error = OK;
    }
    return OK;
}
int ncclCommFinalize(Comm *comm) {
    if (int error = check(comm))
        return error;
    comm->finalized = true;
    comm->asked = 0;
    return comm->blocks ? OK : IN_PROGRESS;
}
// Never deleted: the work that it has started may be asked after.
int ncclCommAbort(Comm *comm) {
    *comm->aborted = true;
    return OK;
}
int ncclCommDestroy(Comm *comm) {
    if (!comm->blocks && (!comm->finalized || !comm->asked))
        return refuse(comm, INVALID_USAGE, "ncclCommDestroy before ncclCommFinalize is done");
    return ncclCommAbort(comm);
}

int ncclGroupStart() {
    group.depth++;
    return OK;
}
int ncclGroupEnd() {
    if (!group.depth)
        return refuse(nullptr, INVALID_USAGE, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth)
        return OK;
    auto all = std::move(group.messages);
    group.messages.clear();
    int result = OK;
    for (auto &[comm, messages] : all)
        if (int error = start_messages(comm, std::move(messages)))
            result = error;
    return result;
}
int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return message(comm, const_cast<void *>(from), count * size_of(type), peer, stream, true);
}
int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return message(comm, to, count * size_of(type), peer, stream, false);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
    if (int error = check(comm))
        return error;
    size_t bytes = count * size_of(type);
    auto take = [bytes](const Meeting &meeting, char *to) {
        for (const Bytes &part : meeting.brought) {
            memcpy(to, part.data(), bytes);
            to += bytes;
        }
    };
    std::string call = "ncclAllGather of " + std::to_string(bytes);
    return launch(comm, {"ncclAllGather", meet(comm, call, from, bytes, bytes * comm->size, to, take), stream});
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    if (int error = check(comm))
        return error;
    if (root < 0 || root >= comm->size)
        return refuse(comm, INVALID_ARGUMENT, "no rank " + std::to_string(root));
    size_t bytes = count * size_of(type);
    auto take = [bytes, root](const Meeting &meeting, char *to) { memcpy(to, meeting.brought[root].data(), bytes); };
    std::string call = "ncclBroadcast of " + std::to_string(bytes) + " from " + std::to_string(root);
    size_t brought = comm->rank == root ? bytes : 0;
    return launch(comm, {"ncclBroadcast", meet(comm, call, from, brought, bytes, to, take), stream});
}
}

} // namespace emulated
