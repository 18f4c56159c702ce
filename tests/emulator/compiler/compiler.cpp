#include "compiler.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <regex>
#include <sstream>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

namespace emulated {
namespace {

constexpr const char *HEADER = ".version 9.0\n.target sm_90\n.address_size 64\n// emulated GPU\n";
constexpr const char *OBJECT = "// object ", *FILE_ = "// file ", *OPTION = "// option ";

std::string read(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

void write(const std::string &path, const std::string &text) { std::ofstream(path, std::ios::binary) << text; }

bool exists(const std::string &path) { return access(path.c_str(), R_OK) == 0; }

std::string hash(const std::string &text) {
    unsigned long long a = 0xcbf29ce484222325, b = 0x9e3779b97f4a7c15;
    for (unsigned char c : text) {
        a = (a ^ c) * 0x100000001b3;
        b = (b ^ (c + 1)) * 0x100000001b3;
        b ^= b >> 29;
    }
    char digits[40];
    snprintf(digits, sizeof digits, "%016llx%016llx", a, b);
    return digits;
}

// Runs a program with its output in `log`.
bool run(const std::vector<std::string> &command, const std::string &log) {
    std::vector<char *> arguments;
    for (const std::string &word : command)
        arguments.push_back(const_cast<char *>(word.c_str()));
    arguments.push_back(nullptr);
    std::vector<char *> environment;
    for (char **variable = environ; *variable; variable++)
        if (strncmp(*variable, "LD_PRELOAD=", 11)) // address sanitizer is for the program, not for g++
            environment.push_back(*variable);
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t child;
    int error = posix_spawnp(&child, arguments[0], &actions, nullptr, arguments.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    if (error) {
        write(log, command[0] + ": " + strerror(error) + "\n");
        return false;
    }
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return false;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool asked_for(const char *variable) {
    const char *value = getenv(variable);
    return value && *value == '1';
}

std::vector<std::string> code_flags(const Source &source) {
    std::vector<std::string> flags = {"-O1",
                                      "-g1",
                                      "-w",
                                      "-fPIC",
                                      "-fno-strict-aliasing",
                                      "-fno-gnu-unique",
                                      "-fno-threadsafe-statics",
                                      "-fno-exceptions",
                                      "-fno-rtti",
                                      "-fsanitize=alignment,bounds,integer-divide-by-zero,unreachable,return",
                                      "-fno-sanitize-recover=all"};
    if (source.bare) // what candle's kernels do now and then, and a GPU puts up with
        flags.push_back("-fsanitize=shift,null");
    bool fma = __builtin_cpu_supports("fma");
    if (fma)
        flags.push_back("-mfma");
    flags.push_back(source.fmad && fma ? "-ffp-contract=fast" : "-ffp-contract=off");
    if (asked_for("EMULATED_GPU_ASAN"))
        flags.push_back("-fsanitize=address");
    if (asked_for("EMULATED_GPU_RACES"))
        flags.push_back("-fsanitize=thread");
    return flags;
}

// What NVRTC would not have found, having no headers but its own.
std::string missing_in_bare(const Source &source) {
    static const std::regex include(R"((?:^|\n)[ \t]*#[ \t]*include[ \t]*([<"][^>"]*[>"]))");
    static const std::regex sized(R"(\bu?int(?:8|16|32|64)_t\b)");
    static const std::regex defined(R"((?:typedef|using)[^;]*\bu?int(?:8|16|32|64)_t\b)");
    std::smatch match;
    bool paths = false;
    for (const std::string &flag : source.flags)
        paths |= flag.rfind("-I", 0) == 0;
    if (!paths && std::regex_search(source.text, match, include))
        return source.name + ": error: could not open source file " + match[1].str() +
               " (no directories in search list)\n";
    static const std::regex comments(R"(//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)");
    std::string code = std::regex_replace(source.text, comments, " ");
    if (code.find("#include") == std::string::npos && std::regex_search(code, match, sized) &&
        !std::regex_search(code, defined))
        return source.name + ": error: identifier \"" + match[0].str() + "\" is undefined\n";
    return "";
}

} // namespace

std::string root() {
    Dl_info info;
    char path[4096] = "";
    // Of the library that this is a part of, or of the program.
    if (!dladdr(reinterpret_cast<void *>(&root), &info) || !realpath(info.dli_fname, path))
        abort();
    std::string file = path;
    for (int i = 0; i < 2; i++)
        file.erase(file.rfind('/'));
    return file;
}

Compiled compile(const Source &source) {
    Compiled result;
    std::string key = std::string(EMULATED_GPU_VERSION) + source.name + source.text + source.dependencies;
    for (const std::string &flag : source.flags)
        key += '\0' + flag;
    for (const std::string &flag : code_flags(source))
        key += '\0' + flag;
    std::string cache = root() + "/cache";
    mkdir(cache.c_str(), 0777);
    std::string object = hash(key) + ".so", path = cache + "/" + object;
    if (exists(path)) {
        result.object = path;
        return result;
    }
    if (source.bare && !(result.log = missing_in_bare(source)).empty())
        return result;

    char folder[] = "/tmp/emulated-gpu-XXXXXX";
    if (!mkdtemp(folder)) {
        result.log = "no temporary folder\n";
        return result;
    }
    // The folder's name, as two threads of one process may compile one source at the same time.
    std::string at = std::string(folder) + "/", log = at + "log", made = path + strrchr(folder, '-');
    size_t slash = source.name.rfind('/');
    std::string name = slash == std::string::npos ? source.name : source.name.substr(slash + 1);
    write(at + name, source.text);
    std::vector<std::string> command = {"g++", "-E", "-w", "-x", "c++", "-include", root() + "/device/device.hpp"};
    bool dialect = false;
    for (const std::string &flag : source.flags)
        dialect |= flag.rfind("-std=", 0) == 0;
    if (!dialect)
        command.push_back("-std=c++17");
    std::vector<std::string> standard;
    for (const std::string &flag : source.flags) {
        command.push_back(flag);
        if (flag.rfind("-std=", 0) == 0)
            standard.push_back(flag);
    }
    if (standard.empty())
        standard.push_back("-std=c++17");
    command.insert(command.end(),
                   {"-I" + root() + "/include", "-D__CUDACC__", "-D__NVCC__", "-D__CUDACC_VER_MAJOR__=13",
                    "-D__CUDACC_VER_MINOR__=0", "-DEMULATED_GPU", at + name, "-o", at + "preprocessed"});
    bool well = run(command, log);
    if (well) {
        // As many threads as fit whatever registers a kernel takes: 255 each, of 65536.
        const char *unbounded = source.bare ? "256" : "1024";
        write(at + "rewritten.ii", rewrite(read(at + "preprocessed"), unbounded));
        std::vector<std::string> build = {"g++", "-fpreprocessed", "-c"};
        std::vector<std::string> flags = code_flags(source);
        build.insert(build.end(), flags.begin(), flags.end());
        build.insert(build.end(), standard.begin(), standard.end());
        build.insert(build.end(), {at + "rewritten.ii", "-o", at + "object"});
        // Without the sanitizers' libraries: the driver has what reports, and ends the launch.
        well = run(build, log) && run({"g++", "-shared", "-Wl,-Bsymbolic", at + "object", "-o", made}, log);
    }
    result.log = read(log);
    for (size_t found; (found = result.log.find(at)) != std::string::npos;)
        result.log.erase(found, at.size());
    if (well && rename(made.c_str(), path.c_str()) == 0)
        result.object = path;
    else if (well)
        result.log += path + ": " + strerror(errno) + "\n";
    if (getenv("EMULATED_GPU_KEEP"))
        fprintf(stderr, "emulated GPU: %s is in %s\n", name.c_str(), folder);
    else {
        for (const std::string &file : {name, std::string("log"), std::string("preprocessed"),
                                        std::string("rewritten.ii"), std::string("object")})
            unlink((at + file).c_str());
        rmdir(folder);
    }
    return result;
}

Compiled compile_file(const std::string &path, const std::vector<std::string> &options) {
    Source source;
    source.name = path;
    source.text = read(path);
    std::string folder = path.substr(0, path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    if (folder.empty())
        folder = ".";
    source.flags = {"-I" + folder, "-D__CUDA_ARCH__=900"};
    for (const std::string &option : options)
        source.flags.push_back(option);
    if (DIR *files = opendir(folder.c_str())) {
        std::vector<std::string> names;
        while (dirent *entry = readdir(files))
            if (std::string name = entry->d_name; name.size() > 4 && name.substr(name.size() - 4) == ".cuh")
                names.push_back(folder + "/" + name);
        closedir(files);
        std::sort(names.begin(), names.end());
        for (const std::string &name : names)
            source.dependencies += read(name);
    }
    return compile(source);
}

std::string image_of_object(const std::string &object) {
    return HEADER + std::string(OBJECT) + object.substr(object.rfind('/') + 1) + "\n";
}

std::string image_of_file(const std::string &path, const std::vector<std::string> &options) {
    std::string image = HEADER + std::string(FILE_) + path + "\n";
    for (const std::string &option : options)
        image += OPTION + option + "\n";
    return image;
}

Compiled load_image(const std::string &image) {
    Compiled result;
    if (image.rfind(HEADER, 0) != 0) {
        result.log = "not made for the emulated GPU\n";
        return result;
    }
    std::stringstream lines(image);
    std::string path;
    std::vector<std::string> options;
    for (std::string line; std::getline(lines, line);) {
        auto rest = [&](const char *start) { return line.substr(strlen(start)); };
        if (line.rfind(OBJECT, 0) == 0) {
            result.object = root() + "/cache/" + rest(OBJECT);
            if (!exists(result.object)) {
                result.log = "the cache has no " + rest(OBJECT) + " any more\n";
                result.object.clear();
            }
            return result;
        }
        if (line.rfind(FILE_, 0) == 0)
            path = rest(FILE_);
        if (line.rfind(OPTION, 0) == 0)
            options.push_back(rest(OPTION));
    }
    if (path.empty()) {
        result.log = "an image without kernels\n";
        return result;
    }
    return compile_file(path, options);
}

} // namespace emulated
