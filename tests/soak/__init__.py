"""A campaign of attacks that anyone can repeat: `make soak`, see docs/reliability.md.

Each kind of attack is one function (random.Random) -> Tried in `KINDS` of `soak.kinds`. What a case does is drawn from
its kind, the campaign's seed and its number, so a failure is repeated by `python -m soak --case KIND:SEED/NUMBER`.
"""
