// The fake hiprtc and nvrtc: compiles kernels for this machine's CPU with the system's C++ compiler.
//
// Built twice, with NAME(x) giving the prefix. What it makes is a shared library, which the fake driver loads.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <sstream>
#include <string>
#include <unistd.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(call) JOIN(EXPERTIER_FAKE_PREFIX, call)
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

enum { OK = 0, OUT_OF_MEMORY = 1, CREATION_FAILURE = 2, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6 };

struct Program {
    std::string source, log, code;
};

static std::string read(const std::string & path) {
    std::ostringstream content;
    content << std::ifstream(path, std::ios::binary).rdbuf();
    return content.str();
}

// The header lies beside this library.
static std::string header_folder() {
    Dl_info info;
    dladdr((void *) &header_folder, &info);
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

static std::string quoted(const std::string & text) {
    std::string out = "'";
    for (char c : text) {
        c == '\'' ? out += "'\\''" : out += c;
    }
    return out + "'";
}

// The name after `extern "C" __global__ void`, from `at` on; `at` moves behind it. Empty: no more.
static std::string next_kernel(const std::string & source, size_t & at) {
    const std::string mark = "__global__ void ";
    at = source.find(mark, at);
    if (at == std::string::npos) {
        return "";
    }
    at += mark.size();
    const std::string bounds = "__launch_bounds__(";
    if (!source.compare(at, bounds.size(), bounds)) {
        at = source.find_first_not_of(" \n", source.find(')', at) + 1);
    }
    size_t end = at;
    while (end < source.size() && (isalnum((unsigned char) source[end]) || source[end] == '_')) {
        end++;
    }
    return source.substr(at, end - at);
}

extern "C" {
const char * NAME(GetErrorString)(int code) {
    return code == OK            ? TEXT(EXPERTIER_FAKE_PREFIX) "_SUCCESS"
           : code == COMPILATION ? TEXT(EXPERTIER_FAKE_PREFIX) "_ERROR_COMPILATION"
                                 : TEXT(EXPERTIER_FAKE_PREFIX) "_ERROR";
}
int NAME(Version)(int * major, int * minor) {
    *major = 0;
    *minor = 1;
    return OK;
}
int NAME(CreateProgram)(Program ** out, const char * source, const char *, int headers, const char **, const char **) {
    if (!out || !source || headers) {
        return INVALID_INPUT;
    }
    *out = new Program{ source, "", "" };
    return OK;
}
int NAME(DestroyProgram)(Program ** program) {
    if (!program || !*program) {
        return INVALID_PROGRAM;
    }
    delete *program;
    *program = nullptr;
    return OK;
}
int NAME(CompileProgram)(Program * program, int n, const char ** options) {
    if (!program) {
        return INVALID_PROGRAM;
    }
    const char * temporary = getenv("TMPDIR");
    std::string folder = std::string(temporary && *temporary ? temporary : "/tmp") + "/expertier-fake-XXXXXX";
    if (!mkdtemp(folder.data())) {
        return CREATION_FAILURE;
    }
    std::string source = folder + "/kernel.cpp", output = folder + "/kernel.so", log = folder + "/log";
    {
        std::ofstream file(source);
        if (program->source.find("__syncthreads") != std::string::npos) {
            file << "#define EXPERTIER_FAKE_BARRIERS\n";
        }
        file << "#include \"cpu_device.h\"\n#line 1 \"kernel\"\n" << program->source << "\n";
        size_t at = 0;
        for (std::string name; !(name = next_kernel(program->source, at)).empty();) {
            file << "EXPERTIER_FAKE_KERNEL(" << name << ")\n";
        }
    }
    const char * compiler = getenv("CXX");
    std::string command = std::string(compiler && *compiler ? compiler : "c++") +
                          " -std=c++17 -O2 -w -shared -fPIC -fvisibility=hidden -I" + quoted(header_folder());
    for (int i = 0; i < n; i++) {
        if (!strncmp(options[i], "-D", 2)) {
            command += " " + quoted(options[i]);
        }
    }
    command += " " + quoted(source) + " -o " + quoted(output) + " >" + quoted(log) + " 2>&1";
    int status = system(command.c_str());
    program->log = read(log);
    if (!status) {
        program->code = read(output);
    }
    for (const std::string & path : { source, output, log }) {
        unlink(path.c_str());
    }
    rmdir(folder.c_str());
    return status ? COMPILATION : OK;
}
int NAME(GetProgramLogSize)(Program * program, size_t * out) {
    *out = program->log.size() + 1;
    return OK;
}
int NAME(GetProgramLog)(Program * program, char * out) {
    memcpy(out, program->log.c_str(), program->log.size() + 1);
    return OK;
}
int NAME(EXPERTIER_FAKE_CODE_SIZE)(Program * program, size_t * out) {
    *out = program->code.size();
    return OK;
}
int NAME(EXPERTIER_FAKE_CODE)(Program * program, char * out) {
    memcpy(out, program->code.data(), program->code.size());
    return OK;
}
int NAME(AddNameExpression)(Program *, const char *) { return OK; }
int NAME(GetLoweredName)(Program *, const char * name, const char ** out) {
    *out = name;
    return OK;
}
}
