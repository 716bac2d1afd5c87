"""Settings that programs and jobs share: type, default, limits and text of each, once. It imports neither torch nor
pydantic. Begin with `optimizers`.

limits       limits of a setting, written into its type, and the check of both
optimizers   the settings of the optimizers and of their groups
loss_scales  the settings of the loss-scale rules
average      the settings of the average of the weights

The classes of the library inherit them, and so do the sections of a job, each with what differs there.
"""
