"""A launch drawn: operands of one, two and more axes, masks, repeats and scattered accesses."""

from collections.abc import Sequence

from tilewright.records.launch_record import Access, LaunchRecord, Operand, ProgramAccesses, Range
from tilewright.report.geometry import draw


def launch(grid: tuple[int, int, int], *operands: Operand) -> LaunchRecord:
    return LaunchRecord("kernel", "triton", "file.py:1", grid, 128, "9.0", 32, 0, 0, operands)


def operand(name: str, *shape: int) -> Operand:
    return Operand(name, "float32", shape, tuple([1] * len(shape)))


def read(name: str, *ranges: Range, lanes: int | None = None) -> Access:
    volume = 1
    for first, last in ranges:
        volume *= last - first + 1
    sizes = tuple(last - first + 1 for first, last in ranges)
    return Access(name, "read", ranges, volume, lanes or volume, sizes)


def drawn(walks: Sequence[ProgramAccesses], of: LaunchRecord) -> list[str]:
    return [line.rstrip() for line in draw(walks, of).splitlines()]


def test_one_axis_is_told_and_not_drawn() -> None:
    walks = [
        ProgramAccesses((0, 0, 0), (read("x", (0, 127)),)),
        ProgramAccesses((1, 0, 0), (read("x", (128, 199), lanes=128),)),
    ]
    assert drawn(walks, launch((2, 1, 1), operand("x", 200))) == [
        "each walks 1 tile; program 0",
        "  reads x[0–127] in 1 tile of 128",
    ]


def test_a_row_read_twice_says_so() -> None:
    tiles = [read("x", (0, 0), (start, start + 63)) for start in (0, 64)]
    (_, line, *rest) = drawn([ProgramAccesses((0, 0, 0), (*tiles, *tiles))], launch((1, 1, 1), operand("x", 1, 128)))
    assert line == "  reads x[0, 0–127] in 2 tiles of 64, 2 times"
    assert rest[1:] == [
        "x[1, 128]: the tiles of these programs, numbered as each walks them",
        "     program  0–63  64–127",
        "  0        0     1       2",
    ]


def test_masked_and_scattered_lanes_are_counted() -> None:
    masked = read("x", (0, 99), lanes=128)
    scattered = Access("y", "read", ((0, 62),), 32, 32, (32,))
    (_, first, second) = drawn(
        [ProgramAccesses((0, 0, 0), (masked, scattered))], launch((1, 1, 1), operand("x", 100), operand("y", 64))
    )
    assert first == "  reads x[0–99] in 1 tile of 100, 22% of the lanes masked"
    assert second == "  reads y[0–62] in 1 tile of 32, scattered"


def test_programs_of_a_plane_own_tiles_and_many_columns_are_cut() -> None:
    walks = []
    for down, across in ((0, 0), (1, 0), (0, 1), (7, 31)):
        tile = ((128 * down, 128 * down + 127), (128 * across, 128 * across + 127))
        walks.append(
            ProgramAccesses((down, across, 0), (Access("c", "write", tile, 128 * 128, 128 * 128, (128, 128)),))
        )
    assert drawn(walks, launch((8, 32, 1), operand("c", 1024, 4096)))[-6:] == [
        "             program  0–127  128–255  3,968–4,095",
        "      0–127   (0, 0)      1        ·            ·",
        "      0–127   (0, 1)      ·        1            ·",
        "          ⋮        ⋮",
        "    128–255   (1, 0)      1        ·            ·",
        "  896–1,023  (7, 31)      ·        ·            1",
    ]
    wide = [ProgramAccesses((0, 0, 0), tuple(read("x", (0, 0), (n, n)) for n in range(40)))]
    header = drawn(wide, launch((1, 1, 1), operand("x", 1, 40)))[-2].split()
    assert header == ["program", "0", "1", "2", "3", "4", "5", "6", "…", "39"]


def test_nothing_touched_is_no_tile() -> None:
    nothing = Access("x", "read", (), 0, 128, (128,))
    assert drawn([ProgramAccesses((0, 0, 0), (nothing,))], launch((1, 1, 1), operand("x", 0))) == [
        "each walks 0 tiles; program 0"
    ]
