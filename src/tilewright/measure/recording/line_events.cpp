// Traces the lines of one thread for line_tracer.py, as its Python functions would, at a tenth of their cost: a line
// is two numbers in an array, and a call that is not of the user's code is one lookup. The functions of Python that it
// takes are declared here, since they are the same in all versions, and no header of Python need be installed.

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

struct Object;  // a frame, a code object, or any other of Python's

extern "C" {
Object *PyFrame_GetCode(Object *frame);
Object *PyFrame_GetBack(Object *frame);
int PyFrame_GetLineNumber(Object *frame);
void Py_DecRef(Object *object);
void PyEval_SetTrace(int (*function)(Object *, Object *, int, Object *), Object *seen_as);
}

namespace {

constexpr int LINE = 2, RETURN = 3;  // PyTrace_LINE, PyTrace_RETURN
constexpr int64_t NOWHERE = -1;

struct Known {
    Object *code;
    int64_t first;  // the place of the function's line 0, or NOWHERE where it is not the user's
};

struct Log {
    int64_t (*first_of)(Object *code);  // Python's, asked once for each code object, which it keeps alive
    int64_t *times, *places;
    int64_t size, room, most;
    Known *known;
    uint64_t slots, filled;  // slots: a power of two
    bool stopped, ended_early;
};

thread_local Log *current = nullptr;

int64_t now() {
    timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return int64_t(at.tv_sec) * 1000000000 + at.tv_nsec;
}

Known *slot_of(Known *known, uint64_t slots, Object *code) {
    uint64_t at = (uint64_t(code) >> 4) * 0x9E3779B97F4A7C15u;
    for (at ^= at >> 32;; at++) {
        Known *slot = known + (at & (slots - 1));
        if (slot->code == code || !slot->code) return slot;
    }
}

int64_t first_of(Log *log, Object *code) {
    Known *slot = slot_of(log->known, log->slots, code);
    if (slot->code) return slot->first;
    int64_t first = log->first_of(code);
    if (2 * ++log->filled > log->slots) {
        uint64_t slots = 2 * log->slots;
        Known *more = (Known *)calloc(slots, sizeof(Known));
        if (!more) return first;
        for (uint64_t at = 0; at < log->slots; at++)
            if (log->known[at].code) *slot_of(more, slots, log->known[at].code) = log->known[at];
        free(log->known);
        log->known = more;
        log->slots = slots;
    }
    *slot_of(log->known, log->slots, code) = {code, first};
    return first;
}

int64_t first_in(Log *log, Object *frame) {
    Object *code = PyFrame_GetCode(frame);
    int64_t first = first_of(log, code);
    Py_DecRef(code);
    return first;
}

bool has_room(Log *log) {
    if (log->size < log->room) return true;
    int64_t room = 2 * log->room;
    int64_t *times = (int64_t *)realloc(log->times, room * sizeof(int64_t));
    if (times) log->times = times;
    int64_t *places = (int64_t *)realloc(log->places, room * sizeof(int64_t));
    if (places) log->places = places;
    if (!times || !places) return false;
    log->room = room;
    return true;
}

void reach(Log *log, int64_t place) {
    bool ends = log->size >= log->most;
    if (ends) log->stopped = log->ended_early = true;
    if (!has_room(log)) {
        log->stopped = log->ended_early = true;
        return;
    }
    log->times[log->size] = now();
    log->places[log->size++] = ends ? NOWHERE : place;
}

// After a return, time belongs to the line that called: of the innermost frame of the user's.
void return_from(Log *log, Object *frame) {
    int64_t place = NOWHERE;
    for (Object *outer = PyFrame_GetBack(frame); outer;) {
        int64_t first = first_in(log, outer);
        if (first != NOWHERE) place = first + PyFrame_GetLineNumber(outer);
        Object *next = place == NOWHERE ? PyFrame_GetBack(outer) : nullptr;
        Py_DecRef(outer);
        outer = next;
    }
    reach(log, place);
}

int on_event(Object *, Object *frame, int what, Object *) {
    Log *log = current;
    if (log && !log->stopped && (what == LINE || what == RETURN)) {
        int64_t first = first_in(log, frame);
        if (first == NOWHERE) return 0;
        if (what == RETURN)
            return_from(log, frame);
        else
            reach(log, first + PyFrame_GetLineNumber(frame));
    }
    if (!log || log->stopped) {
        current = nullptr;
        PyEval_SetTrace(nullptr, nullptr);
    }
    return 0;
}

}  // namespace

extern "C" {

// Trace the calling thread; `sys.gettrace()` gives `seen_as`. Null where there is no memory.
Log *tilewright_start(Object *seen_as, int64_t (*first_of)(Object *), int64_t most) {
    Log *log = (Log *)calloc(1, sizeof(Log));
    if (!log) return nullptr;
    *log = {first_of, nullptr, nullptr, 0, 1 << 12, most, nullptr, 1 << 10, 0, false, false};
    log->times = (int64_t *)malloc(log->room * sizeof(int64_t));
    log->places = (int64_t *)malloc(log->room * sizeof(int64_t));
    log->known = (Known *)calloc(log->slots, sizeof(Known));
    if (!log->times || !log->places || !log->known) return nullptr;
    current = log;
    PyEval_SetTrace(on_event, seen_as);
    return log;
}

// No event is logged from here on. `traces`: whether the calling thread's tracing is that of `tilewright_start`.
void tilewright_stop(Log *log, int traces) {
    log->stopped = true;
    if (traces && current == log) {
        current = nullptr;
        PyEval_SetTrace(nullptr, nullptr);
    }
}

int64_t tilewright_size(Log *log) { return log->size; }
const int64_t *tilewright_times(Log *log) { return log->times; }
const int64_t *tilewright_places(Log *log) { return log->places; }
int tilewright_ended_early(Log *log) { return log->ended_early; }

// After `tilewright_stop`, and after the arrays were read. The log remains: its thread may still look at `stopped`.
void tilewright_forget(Log *log) {
    free(log->times);
    free(log->places);
    free(log->known);
    log->times = log->places = nullptr;
    log->known = nullptr;
}
}
