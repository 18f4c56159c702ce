// The words of CUDA C++ that no macro can explain to g++.
#include <cctype>
#include <string>
#include <vector>

#include "compiler.hpp"

namespace emulated {
namespace {

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

struct Kernel {
    std::string name, bounds;
};

class Rewriter {
  public:
    // A kernel without launch bounds has at most `unbounded` threads a block.
    Rewriter(const std::string &text, const char *unbounded) : text(text), unbounded(unbounded) {}

    std::string run() {
        while (at < text.size())
            step();
        out += "\n#pragma GCC diagnostic ignored \"-Wreturn-type-c-linkage\"\n";
        for (const Kernel &kernel : kernels)
            out += "extern \"C\" const emulated::Kernel emulated_kernel_" + kernel.name + " = emulated::Thunk<&" +
                   kernel.name + ">::describe(" + (kernel.bounds.empty() ? unbounded : kernel.bounds) + ");\n";
        return out;
    }

  private:
    const std::string &text;
    const std::string unbounded;
    std::string out;
    size_t at = 0;
    // For each open brace whether it is a namespace's, or one of `extern "C"`.
    std::vector<bool> braces;
    size_t statement = 0; // where in `out` the present statement begins
    std::vector<Kernel> kernels;
    std::string bounds;

    bool in_function() const {
        for (bool space : braces)
            if (!space)
                return true;
        return false;
    }

    void copy(size_t end) {
        out.append(text, at, end - at);
        at = end;
    }

    size_t after_literal(size_t from) const {
        char quote = text[from];
        size_t end = from + 1;
        while (end < text.size() && text[end] != quote)
            end += text[end] == '\\' ? 2 : 1;
        return end + 1;
    }

    // And past line markers, which come in the middle of what a macro expands to.
    size_t after_spaces(size_t from) const {
        for (;;) {
            while (from < text.size() && std::isspace(static_cast<unsigned char>(text[from])))
                from++;
            if (from >= text.size() || text[from] != '#' || text[from - 1] != '\n')
                return from;
            from = std::min(text.find('\n', from), text.size());
        }
    }

    size_t after_name(size_t from) const {
        while (from < text.size() && is_name(text[from]))
            from++;
        return from;
    }

    // Past the bracket that closes the one at `from`.
    size_t after_brackets(size_t from) const {
        int depth = 0;
        for (size_t i = from; i < text.size(); i++) {
            if (text[i] == '"' || text[i] == '\'') {
                i = after_literal(i) - 1;
                continue;
            }
            depth += text[i] == '(' || text[i] == '[' || text[i] == '{';
            depth -= text[i] == ')' || text[i] == ']' || text[i] == '}';
            if (depth == 0)
                return i + 1;
        }
        return text.size();
    }

    size_t end_of_statement(size_t from) const {
        while (from < text.size() && text[from] != ';')
            from = text[from] == '(' || text[from] == '[' || text[from] == '{' ? after_brackets(from) : from + 1;
        return from;
    }

    void step() {
        char c = text[at];
        if (c == '#' && (at == 0 || text[at - 1] == '\n')) // a line marker, or a pragma
            return copy(std::min(text.find('\n', at), text.size()));
        if (c == '"' || (c == '\'' && !(at && is_name(text[at - 1]))))
            return copy(std::min(after_literal(at), text.size()));
        if (c == '{') {
            std::string head = out.substr(statement);
            bool space = head.find('(') == std::string::npos && head.find('=') == std::string::npos &&
                         (head.find("namespace") != std::string::npos || head.find("extern \"") != std::string::npos);
            braces.push_back(space);
        }
        if (c == '}' && !braces.empty())
            braces.pop_back();
        if (!is_name(c) || std::isdigit(static_cast<unsigned char>(c))) {
            size_t end = std::isdigit(static_cast<unsigned char>(c)) ? after_name(at) : at + 1;
            copy(end);
            if (c == ';' || c == '{' || c == '}')
                statement = out.size();
            return;
        }
        size_t end = after_name(at);
        std::string name = text.substr(at, end - at);
        if (name == "__global__") {
            at = end;
            kernel();
        } else if (name == "__launch_bounds__") {
            size_t open = after_spaces(end), close = after_brackets(open);
            bounds = first_argument(text.substr(open + 1, close - open - 2));
            at = close;
        } else if (name == "__noinline__" && !(out.size() > 1 && (out.back() == '(' || out.back() == ','))) {
            out += "__attribute__((noinline))";
            at = end;
        } else if (name == "__shared__") {
            at = end;
            shared();
        } else if (name == "asm" && in_function()) {
            at = end;
            assembly();
        } else {
            copy(end);
        }
    }

    static std::string first_argument(const std::string &list) {
        int depth = 0;
        for (size_t i = 0; i < list.size(); i++) {
            depth += list[i] == '(';
            depth -= list[i] == ')';
            if (list[i] == ',' && depth == 0)
                return list.substr(0, i);
        }
        return list;
    }

    // Only looks ahead: what it finds is copied by the steps that follow.
    void kernel() {
        if (out.find("template", statement) != std::string::npos)
            return;
        std::string name, limit;
        size_t i = at;
        while (i < text.size() && text[i] != ';' && text[i] != '{') {
            if (is_name(text[i])) {
                size_t end = after_name(i), next = after_spaces(end);
                std::string word = text.substr(i, end - i);
                if (text[next] == '(') {
                    size_t close = after_brackets(next);
                    if (word == "__launch_bounds__")
                        limit = first_argument(text.substr(next + 1, close - next - 2));
                    else if (word != "__attribute__" && word != "alignas") {
                        name = word;
                        i = close;
                        break;
                    }
                    i = close;
                } else
                    i = end;
            } else
                i++;
        }
        if (limit.empty())
            limit = bounds;
        bounds.clear();
        i = after_spaces(i);
        if (!name.empty() && text[i] == '{') // not a mere declaration
            kernels.push_back({name, limit});
    }

    static std::string without_attributes(std::string type) {
        for (const char *word : {"__attribute__", "alignas"})
            for (size_t found; (found = type.find(word)) != std::string::npos;) {
                size_t i = type.find('(', found), depth = 0;
                do {
                    depth += type[i] == '(';
                    depth -= type[i] == ')';
                    i++;
                } while (depth && i < type.size());
                type.erase(found, i - found);
            }
        return type;
    }

    // The last word before any brackets.
    static std::pair<size_t, std::string> declared(const std::string &declarator) {
        size_t end = declarator.find('[');
        if (end == std::string::npos || declarator.find('}') != std::string::npos) {
            size_t brace = declarator.rfind('}');
            end = declarator.find('[', brace == std::string::npos ? 0 : brace);
        }
        if (end == std::string::npos)
            end = declarator.size();
        while (end && !is_name(declarator[end - 1]))
            end--;
        size_t start = end;
        while (start && is_name(declarator[start - 1]))
            start--;
        return {start, declarator.substr(start, end - start)};
    }

    // asm volatile("text" : "=r"(y) : "r"(x) : "memory") becomes a call, whose operands say whether they are written.
    void assembly() {
        size_t open = after_spaces(at);
        for (size_t end; is_name(text[open]); open = after_spaces(end))
            end = after_name(open); // volatile
        size_t close = after_brackets(open), from = open + 1;
        std::vector<std::string> parts(1);
        for (size_t i = from; i + 1 < close;) {
            size_t end = text[i] == '"'                                        ? after_literal(i)
                         : text[i] == '(' || text[i] == '[' || text[i] == '{' ? after_brackets(i)
                                                                               : i + 1;
            if (text[i] == ':')
                parts.emplace_back();
            else
                parts.back().append(text, i, end - i);
            i = end;
        }
        at = close;
        std::string operands;
        for (size_t part = 1; part < parts.size() && part < 3; part++)
            for (size_t i = parts[part].find('"'); i != std::string::npos;) {
                size_t quote = parts[part].find('"', i + 1), bracket = parts[part].find('(', quote);
                char letter = parts[part][quote - 1];
                size_t end = Rewriter(parts[part], "").after_brackets(bracket);
                operands += std::string(part == 1 ? "emulated::output<'" : "emulated::input<'") + letter + "'>" +
                            parts[part].substr(bracket, end - bracket) + ", ";
                i = parts[part].find('"', end);
            }
        out += "({ constexpr emulated::Instruction emulated_ptx = emulated::decode(" + parts[0] +
               "); emulated::Operand emulated_operands[] = {" + operands +
               "emulated::Operand{}}; emulated::execute<emulated_ptx.what>(emulated_ptx, emulated_operands); })";
    }

    void shared() {
        size_t end = end_of_statement(at);
        std::string declaration = text.substr(at, end - at);
        at = end + 1;
        std::string head = out.substr(statement);
        if (size_t word = head.rfind("extern");
            word != std::string::npos && head.find('"', word) == std::string::npos) {
            // All of them are the memory that the launch asks for.
            out.erase(statement + word, 6);
            declaration = without_attributes(declaration);
            auto [start, name] = declared(declaration);
            std::string type = declaration.substr(0, start);
            out += in_function()
                       ? type + " *const " + name + " = reinterpret_cast<" + type + " *>(emulated_dynamic_shared);"
                       : "static " + type + " *&" + name + " = reinterpret_cast<" + type +
                             " *&>(emulated_dynamic_shared);";
            statement = out.size();
            return;
        }
        bool is_static = head.find("static") != std::string::npos;
        out += std::string(is_static ? "" : "static ") + declaration + ";";
        if (in_function())
            for (size_t from = 0; from <= declaration.size();) {
                size_t comma = from;
                int depth = 0;
                while (comma < declaration.size() && !(declaration[comma] == ',' && depth == 0)) {
                    char c = declaration[comma++];
                    depth += c == '(' || c == '[' || c == '{' || c == '<';
                    depth -= c == ')' || c == ']' || c == '}' || c == '>';
                }
                std::string name = declared(declaration.substr(from, comma - from)).second;
                out += " emulated::emulated_shared(static_cast<void *>(&" + name + "), sizeof " + name + ");";
                from = comma + 1;
            }
        statement = out.size();
    }
};

} // namespace

std::string rewrite(const std::string &preprocessed, const char *unbounded) {
    return Rewriter(preprocessed, unbounded).run();
}

} // namespace emulated
