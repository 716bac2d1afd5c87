"""Audit of a training step: the dtype in which every number is kept, and the digits that it loses. It imports any room
below `tools`, and `verify`. Begin with `audit`.

facts      facts on each parameter; the ranks' parts put together
finite     first loss, gradient, state or weight that is not finite
watch      dtypes that a step computes and sends with, and its gradients, seen operation by operation
fp8_codes  products in FP8, and shares of their codes
updates    changes by an update: of a torch optimizer, or of a `ShardedEngine`
holders    tensors that the optimizer updates for each parameter, and the dtypes that DDP and FSDP2 declare
report     rows by pattern, and the page
warnings   facts that do harm, and their remedies; the texts of WRONG and look are in warnings.toml
audit      `megamix.audit`, which puts these together
script     audit of any command, from outside
in_script  its part in each process of the script
start      folder on the script's path, by which its Pythons tell of their updates
"""
