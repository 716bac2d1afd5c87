"""The command line: one file a verb, or a few that are alike. It imports any room, heavy ones inside the functions, and
no room imports it. Begin with `verbs`. The verbs of each file:

parser      parsers whose errors end with a command that works, and how a verb's errors are told
config      `config`
prepare     `prepare`
train       `train`
checkpoint  `checkpoint`
hf          `import`, `export`, `generate` and `evaluate`
report      `plot`, `report` and `status`
hang        `hang`
plan        `plan`
audit       `audit`
verify      `verify`
doctor      `doctor`
bench       `bench`
verbs       the table of verbs, and the one that is called
pretrain    the process of launch/pretrain.sh: it checks a job, then is its launcher
"""


def main(argv: list[str] | None = None) -> int:
    """Run the verb that the command line names: the command `megamix`. Nothing is imported before, for a process first
    says what it does at a signal.
    """
    from megamix.cli import verbs

    return verbs.main(argv)
