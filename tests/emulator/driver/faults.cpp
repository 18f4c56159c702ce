// What a kernel does wrong becomes an error of its launch.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <thread>
#include <time.h>

#include "driver.hpp"

namespace emulated {
namespace {

struct sigaction before[64];

void handle(int signal, siginfo_t *info, void *context) {
    if (in_kernel()) {
        if (signal == SIGXCPU)
            fail(LAUNCH_TIMEOUT, "ran for longer than EMULATED_GPU_TIMEOUT allows: do its threads wait in a loop?");
        if (signal == SIGSEGV || signal == SIGBUS)
            fail(ILLEGAL_ADDRESS, info->si_code == SI_KERNEL ? "access to what is no address"
                                                             : "access " + memory::describe(info->si_addr));
        fail(LAUNCH_FAILED, strsignal(signal));
    }
    if (signal == SIGXCPU) // the kernel ended meanwhile
        return;
    const struct sigaction &old = before[signal];
    if (old.sa_flags & SA_SIGINFO)
        old.sa_sigaction(signal, info, context);
    else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN)
        old.sa_handler(signal);
    else
        sigaction(signal, &old, nullptr); // and it happens again
}

std::atomic<pthread_t> running{0};
std::atomic<int64_t> since{0};

// Of the thread itself: a machine that does other things is no kernel's fault.
int64_t seconds_of(pthread_t thread) {
    clockid_t clock;
    timespec time{};
    if (pthread_getcpuclockid(thread, &clock) == 0)
        clock_gettime(clock, &time);
    return time.tv_sec;
}

void watchdog() {
    const char *text = getenv("EMULATED_GPU_TIMEOUT");
    int64_t limit = text ? atoll(text) : 300;
    for (;;) {
        std::this_thread::sleep_for(std::chrono::seconds(1));
        pthread_t thread = running;
        if (thread && seconds_of(thread) - since > limit)
            pthread_kill(thread, SIGXCPU);
    }
}

} // namespace

void catch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGXCPU}) {
            if (getenv("EMULATED_GPU_ASAN") && signal != SIGXCPU)
                continue; // address sanitizer tells more
            struct sigaction action{};
            action.sa_sigaction = handle;
            // The handler may never return: the signal must not stay blocked.
            action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
            sigaction(signal, &action, &before[signal]);
        }
        std::thread(watchdog).detach();
    });
}

void watch(bool begin) {
    since = seconds_of(pthread_self());
    running = begin ? pthread_self() : 0;
}

namespace {

struct Location {
    const char *file;
    uint32_t line, column;
};

std::string at(const Location *location) {
    return location->file + (":" + std::to_string(location->line)) + ":" + std::to_string(location->column) + ": ";
}

struct Mismatch {
    Location location;
    const void *type;
    unsigned char log_alignment, kind;
};

} // namespace

// Called by kernels that g++ has instrumented.
extern "C" {
void __ubsan_handle_type_mismatch_v1_abort(Mismatch *data, uintptr_t pointer) {
    if (!pointer)
        fail(ILLEGAL_ADDRESS, at(&data->location) + "access through a null pointer");
    char text[64];
    snprintf(text, sizeof text, "%#lx is not aligned to %d bytes", pointer, 1 << data->log_alignment);
    fail(MISALIGNED_ADDRESS, at(&data->location) + text);
}
void __ubsan_handle_out_of_bounds_abort(Location *location, uintptr_t index) {
    fail(ILLEGAL_ADDRESS, at(location) + "index " + std::to_string(static_cast<long>(index)) + " is out of its array");
}
void __ubsan_handle_divrem_overflow_abort(Location *location) {
    fail(LAUNCH_FAILED, at(location) + "integer division by zero");
}
void __ubsan_handle_shift_out_of_bounds_abort(Location *location) {
    fail(LAUNCH_FAILED, at(location) + "shift by more bits than there are, or of a negative number");
}
void __ubsan_handle_builtin_unreachable(Location *location) { fail(LAUNCH_FAILED, at(location) + "unreachable"); }
void __ubsan_handle_missing_return(Location *location) {
    fail(LAUNCH_FAILED, at(location) + "a function ends without its value");
}
}

} // namespace emulated
