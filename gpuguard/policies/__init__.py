"""Rules: one file each, and the engine that makes verdicts of what they find.  Everything in here is pure.

A rule is a frozen dataclass.  Its fields are its keys in a policy file (``Annotated[int, parse_bytes]`` names the
parser of a key), its docstring is its help, and check() says for whom its condition holds in one View.  Unknown is
innocent: a value of None satisfies no condition.  A rule knows nothing of time windows, exemptions and steps: see
engine.
"""
