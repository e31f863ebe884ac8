// Makes SIGINT pending at the n-th instruction of Python code, where CPython then delivers it by its own rules.
//
// A trace function in C counts instructions and calls PyErr_SetInterrupt, which is what the signal's C handler does.
// It runs no Python code and raises nothing itself: an exception out of a trace function rises at places where CPython
// never looks at signals, such as between taking a lock and the `with` that gives it back. Declared here is what it
// needs of Python's stable interface, so that no headers have to be installed.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define TEST_EXPORT __attribute__((visibility("default")))

typedef struct object object;
typedef int (*trace_function)(object * self, object * frame, int what, object * argument);

extern object _Py_TrueStruct;
void PyEval_SetTrace(trace_function function, object * self);
void PyErr_SetInterrupt(void);
void PyErr_Clear(void);
object * PyFrame_GetCode(object * frame);
int PyFrame_GetLineNumber(object * frame);
object * PyObject_GetAttrString(object * owner, const char * name);
int PyObject_SetAttrString(object * owner, const char * name, object * value);
const char * PyUnicode_AsUTF8(object * text);
void Py_DecRef(object * owned);

enum { TRACE_CALL = 0, TRACE_OPCODE = 7 }; // of PyTrace_*

static int64_t left;         // instructions until the interrupt; below 0 when it has come
static int64_t counted;      // instructions so far
static const char * folders; // of the files whose instructions count, each followed by a newline
static char place[512];      // where it came

static int is_chosen(const char * file) {
    for (const char * folder = folders; *folder;) {
        const char * end = strchr(folder, '\n');
        if (strncmp(file, folder, (size_t) (end - folder)) == 0) {
            return 1;
        }
        folder = end + 1;
    }
    return 0;
}

static const char * text_of(object * code, const char * name, char * into, size_t n) {
    object * text = PyObject_GetAttrString(code, name);
    if (!text) {
        PyErr_Clear();
        return strncpy(into, "?", n);
    }
    const char * found = PyUnicode_AsUTF8(text);
    snprintf(into, n, "%s", found ? found : "?");
    Py_DecRef(text);
    return into;
}

static void count(object * frame) {
    counted++;
    if (--left == 0) {
        char file[256], function[128];
        object * code = PyFrame_GetCode(frame);
        text_of(code, "co_filename", file, sizeof file);
        text_of(code, "co_qualname", function, sizeof function);
        Py_DecRef(code);
        snprintf(place, sizeof place, "%s:%d, %s", file, PyFrame_GetLineNumber(frame), function);
        PyErr_SetInterrupt();
    }
}

static int trace(object * self, object * frame, int what, object * argument) {
    (void) self;
    (void) argument;
    if (what == TRACE_CALL) { // a function's first instruction, or a generator's when it goes on
        char file[256];
        object * code = PyFrame_GetCode(frame);
        int chosen = is_chosen(text_of(code, "co_filename", file, sizeof file));
        Py_DecRef(code);
        if (chosen) {
            if (PyObject_SetAttrString(frame, "f_trace_opcodes", &_Py_TrueStruct) < 0) {
                PyErr_Clear();
            }
            count(frame);
        }
    } else if (what == TRACE_OPCODE) {
        count(frame);
    }
    return 0;
}

// Has SIGINT pending before the `nth` instruction that this thread runs from now on in functions of files in `in`,
// which must stay in memory. Functions that run already do not count.
TEST_EXPORT void interrupt_at(int64_t nth, const char * in) {
    left = nth;
    counted = 0;
    folders = in;
    place[0] = '\0';
    PyEval_SetTrace(trace, NULL);
}

// Ends that; returns how many instructions there were.
TEST_EXPORT int64_t interrupt_end(void) {
    PyEval_SetTrace(NULL, NULL);
    return counted;
}

// Where the interrupt came, as file, line and function; empty where it did not.
TEST_EXPORT const char * interrupt_place(void) { return place; }
