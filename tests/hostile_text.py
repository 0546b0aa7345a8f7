"""Every character that a terminal, a log or a page must not be given as it is."""

#: Written out here by hand: what a terminal obeys, what reorders a line, what is there unseen.
OBEYED = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
REORDERS = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
UNSEEN = [0xAD, 0x200B, 0x200C, 0x200D, *range(0x2060, 0x2066), *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC)]
UNSEEN += [0x180E, *range(0xE0000, 0xE0080)]
ENDS_A_LINE = [0x2028, 0x2029]
HALVES = [0xD800, 0xDBFF, 0xDC00, 0xDC80, 0xDFFF]
HOSTILE = [chr(number) for number in (*OBEYED, *REORDERS, *UNSEEN, *ENDS_A_LINE, *HALVES)]
