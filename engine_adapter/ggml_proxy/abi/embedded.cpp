// The interpreter is loaded at run time, so that the proxy itself needs no Python. It uses only functions that every
// version of Python's C interface has.
//
//     expertier exec ─► execve(llama-server) ─► ggml loads this library ─► libpython ─► engine_adapter/hosts/exec/embedded.py

#include "abi/embedded.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

namespace expertier {

namespace {

constexpr const char * library_variable = "EXPERTIER_EMBED_LIBPYTHON"; // see engine_adapter/hosts/exec/tool.py
constexpr const char * home_variable = "EXPERTIER_EMBED_HOME";
constexpr const char * site_variable = "EXPERTIER_EMBED_SITE";
constexpr const char * skeleton_variable = "EXPERTIER_EMBED_SKELETON";

constexpr auto stop_limit = std::chrono::seconds(5);

std::atomic<bool> running{ false };

struct Python {
    void (*initialize)(int);
    int (*is_initialized)();
    int (*run)(const char *);
    void * (*save_thread)();
    int (*ensure)();
    void (*release)(int);
};

Python python;

template <typename F> bool find(void * library, const char * name, F & function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    return function != nullptr;
}

bool load(const char * path) {
    void * library = dlopen(path, RTLD_NOW | RTLD_GLOBAL); // global: extension modules look its symbols up
    if (library == nullptr) {
        fprintf(stderr, "expertier: %s\n", dlerror());
        return false;
    }
    return find(library, "Py_InitializeEx", python.initialize) &&
           find(library, "Py_IsInitialized", python.is_initialized) &&
           find(library, "PyRun_SimpleString", python.run) && find(library, "PyEval_SaveThread", python.save_thread) &&
           find(library, "PyGILState_Ensure", python.ensure) && find(library, "PyGILState_Release", python.release);
}

struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_set = false;
};

// Called by exit(), which a tool may call anywhere, even in a signal handler on a thread that holds the interpreter's
// lock or waits for it. So another thread writes the summary; where no thread can be started, the tool ends without a
// summary.
void stop() {
    auto done = std::make_shared<Done>();
    try {
        std::thread([done] {
            const int state = python.ensure();
            python.run("expertier_embedded.stop()");
            python.release(state);
            std::lock_guard<std::mutex> guard(done->mutex);
            done->is_set = true;
            done->changed.notify_all();
        }).detach();
    } catch (const std::system_error &) {
        return; // the system starts no more threads
    }
    std::unique_lock<std::mutex> lock(done->mutex);
    done->changed.wait_for(lock, stop_limit, [&] { return done->is_set; });
}

} // namespace

bool start_embedded_tiers() {
    static bool started = false;
    const char * library = getenv(library_variable);
    if (library == nullptr || started) {
        return true;
    }
    if (!load(library)) {
        fprintf(stderr, "expertier: the tiers cannot run in the Python of %s; start the tool with `expertier exec`\n",
                library);
        return false;
    }
    if (python.is_initialized()) {
        return true; // this is a Python program, which starts the tiers itself
    }
    if (const char * home = getenv(home_variable)) {
        setenv("PYTHONHOME", home, 1);
    }
    python.initialize(0); // 0: without Python's signal handlers, as the tool has its own
    unsetenv("PYTHONHOME");
    const char * site = getenv(site_variable);
    const std::string code = std::string("import site\n"
                                         "for folder in '''") +
                             (site ? site : "") +
                             "'''.split(':'):\n"
                             "    site.addsitedir(folder)\n"
                             "import expertier.engine_adapter.hosts.exec.embedded as expertier_embedded\n"
                             "expertier_embedded.start()\n";
    if (python.run(code.c_str()) != 0) {
        return false; // Python has printed why
    }
    python.save_thread(); // from here on engine threads take the interpreter's lock when they need it
    atexit(stop);
    started = true;
    running = true;
    return true;
}

bool is_embedded() { return running; }

bool loads_skeleton() {
    static const bool given = getenv(skeleton_variable) != nullptr;
    return running && given;
}

void say_in_tool(const std::string & message) {
    if (!running) {
        return;
    }
    std::string quoted;
    for (char c : message) {
        if (c == '"' || c == '\\') {
            quoted += '\\';
        }
        quoted += (unsigned char) c < ' ' ? ' ' : c;
    }
    fprintf(stderr, "event=error source=proxy message=\"%s\"\n", quoted.c_str()); // as telemetry.py writes events
}

} // namespace expertier
