"""Where is every number of a training step kept, and what is lost of it?

facts      what is known of each parameter; the ranks' parts put together
watch      what a step computes, sends and makes of each gradient, seen operation by operation
updates    what an update changes: of a torch optimizer, or of a `ShardedEngine`
holders    who holds the truth, and what wrappers say of dtypes
report     rows by pattern, and the page
judgement  which facts do harm, and what to do
audit      the conductor: `megamix.audit`
command    the verb
"""
