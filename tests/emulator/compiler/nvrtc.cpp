// libnvrtc: programs are compiled by g++, and their "PTX" names the library that came out.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "compiler.hpp"

using emulated::Compiled;

namespace {

enum Result { SUCCESS, OUT_OF_MEMORY, CREATION, INVALID_INPUT, INVALID_PROGRAM, INVALID_OPTION, COMPILATION };

struct Program {
    emulated::Source source;
    std::string image, log;
};

bool starts(const std::string &text, const char *with) { return text.rfind(with, 0) == 0; }

// Adds what an option says. The next word may be its value.
bool understand(std::string option, const char *next, bool &used_next, emulated::Source &source, std::string &arch) {
    if (option == "-D" || option == "-I" || option == "--define-macro" || option == "--include-path") {
        if (!next)
            return false;
        used_next = true;
        source.flags.push_back((option == "-D" || option == "--define-macro" ? "-D" : "-I") + std::string(next));
        return true;
    }
    if (starts(option, "-D") || starts(option, "-I")) {
        source.flags.push_back(option);
        return true;
    }
    std::string name = option, value;
    if (size_t equals = option.find('='); equals != std::string::npos) {
        name = option.substr(0, equals);
        value = option.substr(equals + 1);
    }
    name.erase(0, name.find_first_not_of('-'));
    if (name == "define-macro")
        source.flags.push_back("-D" + value);
    else if (name == "include-path")
        source.flags.push_back("-I" + value);
    else if (name == "std")
        source.flags.push_back("-std=" + value);
    else if (name == "fmad")
        source.fmad = value == "true";
    else if (name == "gpu-architecture" || name == "arch") {
        size_t digits = value.find_first_of("0123456789");
        if (digits == std::string::npos)
            return false;
        arch = value.substr(digits, value.find_first_not_of("0123456789", digits) - digits) + "0";
        if (value.back() == 'a') // what later architectures lack
            source.flags.push_back("-D__CUDA_ARCH_FEAT_SM" + value.substr(digits, arch.size() - 1) + "_ALL=1");
    } else {
        static const char *const ignored[] = {"use_fast_math",
                                              "ftz",
                                              "prec-div",
                                              "prec-sqrt",
                                              "maxrregcount",
                                              "lineinfo",
                                              "G",
                                              "device-debug",
                                              "generate-line-info",
                                              "extra-device-vectorization",
                                              "w",
                                              "disable-warnings",
                                              "dc",
                                              "rdc",
                                              "relocatable-device-code",
                                              "restrict",
                                              "default-device",
                                              "dopt",
                                              "device-as-default-execution-space",
                                              "diag-suppress",
                                              "minimal",
                                              "builtin-initializer-list",
                                              "split-compile",
                                              "ptxas-options",
                                              "Xptxas",
                                              "no-cache",
                                              "time"};
        for (const char *known : ignored)
            if (name == known)
                return true;
        return false;
    }
    return true;
}

int copy(const std::string &text, char *to) {
    memcpy(to, text.c_str(), text.size() + 1);
    return SUCCESS;
}

} // namespace

extern "C" {

// One that does not exist, so that what comes out is never taken for a real compiler's.
int nvrtcVersion(int *major, int *minor) {
    *major = 98, *minor = 0;
    return SUCCESS;
}

const char *nvrtcGetErrorString(int result) {
    static const char *const names[] = {"NVRTC_SUCCESS",
                                        "NVRTC_ERROR_OUT_OF_MEMORY",
                                        "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                        "NVRTC_ERROR_INVALID_INPUT",
                                        "NVRTC_ERROR_INVALID_PROGRAM",
                                        "NVRTC_ERROR_INVALID_OPTION",
                                        "NVRTC_ERROR_COMPILATION"};
    return result >= 0 && result < 7 ? names[result] : "NVRTC_ERROR unknown";
}

int nvrtcGetNumSupportedArchs(int *count) {
    *count = 1;
    return SUCCESS;
}

int nvrtcGetSupportedArchs(int *archs) {
    *archs = 90;
    return SUCCESS;
}

int nvrtcCreateProgram(Program **program, const char *text, const char *name, int headers, const char *const *,
                       const char *const *) {
    if (!program || !text)
        return INVALID_INPUT;
    if (headers) {
        fprintf(stderr, "emulated GPU: nvrtcCreateProgram with headers is not implemented\n");
        return CREATION;
    }
    *program = new Program;
    (*program)->source.text = text;
    (*program)->source.name = name && *name ? name : "default_program";
    (*program)->source.bare = true;
    return SUCCESS;
}

int nvrtcDestroyProgram(Program **program) {
    if (!program || !*program)
        return INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    if (!program)
        return INVALID_PROGRAM;
    program->log.clear();
    program->source.flags = {"-D__CUDACC_RTC__"};
    std::string arch = "900";
    for (int i = 0; i < count; i++) {
        bool used_next = false;
        if (!understand(options[i], i + 1 < count ? options[i + 1] : nullptr, used_next, program->source, arch)) {
            program->log = std::string("nvrtc: error: unrecognized option ") + options[i] + " found\n";
            return INVALID_OPTION;
        }
        i += used_next;
    }
    program->source.flags.push_back("-D__CUDA_ARCH__=" + arch);
    Compiled compiled = emulated::compile(program->source);
    program->log = compiled.log;
    if (compiled.object.empty())
        return COMPILATION;
    program->image = emulated::image_of_object(compiled.object);
    return SUCCESS;
}

int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = program->log.size() + 1;
    return SUCCESS;
}
int nvrtcGetProgramLog(Program *program, char *log) { return copy(program->log, log); }

int nvrtcGetPTXSize(Program *program, size_t *size) {
    *size = program->image.size() + 1;
    return program->image.empty() ? INVALID_PROGRAM : SUCCESS;
}
int nvrtcGetPTX(Program *program, char *image) { return copy(program->image, image); }
int nvrtcGetCUBINSize(Program *program, size_t *size) { return nvrtcGetPTXSize(program, size); }
int nvrtcGetCUBIN(Program *program, char *image) { return nvrtcGetPTX(program, image); }
}
