// Which rows a program of backward_tma.cu takes, where every PERIOD-th row begins alike: rows r, r + PERIOD, ... are a
// class. Integer arithmetic only.
//
// Macro: PERIOD.
#pragma once

struct Place {
    int program, programs, block;
    int first;  // vector of a row that is the first of this block
};

// Rows of a program that begin alike; the sums of their columns are partial sum number `slot`, the segments of all
// programs being numbered in the order of classes.
struct Segment {
    int row_count, slot;
    long long row, size, start;  // of their class: first row, rows, and place of the first in the order of classes
};

// The numbers of a segment's rows: known without a division, for one thread has to find them while rows are fetched.
struct RowOrder {
    // Of the class: its first row; rows the first program skips, and has; programs between the first and the last, and
    // those of them before this one; rows of the last program.
    long long row, skipped, early, whole, before, late;

    // Row number `turn` of the program.
    __device__ __forceinline__ long long row_of(long long turn) const {
        return row + PERIOD * (within(turn - skipped, early) + whole * turn + before + within(turn, late));
    }
    static __device__ __forceinline__ long long within(long long count, long long most) {
        return count < 0 ? 0 : count < most ? count : most;
    }
};

// The rows of a program. Where all begin alike, every programs-th row. Otherwise an equal run of the rows in the order
// of classes; within a class, rows go to programs in the order in which they are reached, so that programs read close
// to each other in memory at any time (worth up to a tenth of the bandwidth).
struct RowAssignment {
    long long rows, least, longer;  // `longer` programs have `least` + 1
    int program, programs;
    long long begin, end, position;  // in the order of classes
    int slot;                        // of the next segment

    __device__ __forceinline__ RowAssignment(long long rows_, const Place &at)
        : rows(rows_), least(rows_ / at.programs), longer(rows_ % at.programs), program(at.program),
          programs(at.programs) {
        begin = position = begin_of(program), end = begin_of(program + 1), slot = program;
        for (int number = 1; number < PERIOD && start_of(number) < begin; number++)
            slot += begin_of(program_at(start_of(number))) != start_of(number);
    }
    // The place of a class's first row; the first rows % PERIOD classes have a row more.
    __device__ __forceinline__ long long start_of(int number) const {
        return number * (rows / PERIOD) + (number < rows % PERIOD ? number : rows % PERIOD);
    }
    __device__ __forceinline__ long long begin_of(long long other) const {
        return other * least + (other < longer ? other : longer);
    }
    __device__ __forceinline__ int row_count() const { return int(end - begin); }
    __device__ __forceinline__ Segment next() {
        if (PERIOD == 1) {
            position = end;
            return {row_count(), slot, program, rows, 0};
        }
        const long long size = rows / PERIOD, more = rows % PERIOD;
        const bool early = position < more * (size + 1);
        const long long number = early ? position / (size + 1) : (position - more) / size;
        const long long start = start_of(int(number)), next = start_of(int(number) + 1);
        const long long until = next < end ? next : end;
        const int row_count = int(until - position);
        position = until;
        return {row_count, slot++, number, next - start, start};
    }
    // How the rows of a segment's class are numbered: by turn, then by program.
    __device__ __forceinline__ RowOrder order_of(const Segment &part) const {
        if (PERIOD == 1) return {program, 0, 0, programs, 0, 0};
        const long long first = program_at(part.start), last = program_at(part.start + part.size - 1);
        const long long skipped = part.start - begin_of(first);  // its rows of the class before
        if (first == last) return {part.row, skipped, part.size, 0, 0, 0};
        const long long whole = last - first - 1, before = program > first ? program - first - 1 : 0;
        return {part.row, skipped - (first < program), begin_of(first + 1) - part.start, whole,
                before < whole ? before : whole, part.start + part.size - begin_of(last)};
    }
    // The program whose run holds a place in the order of classes.
    __device__ __forceinline__ long long program_at(long long place) const {
        return place < longer * (least + 1) ? place / (least + 1) : (place - longer) / least;
    }
};
