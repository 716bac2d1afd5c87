"""The memory behind tensors."""


def storage_bytes(tensors):
    """Return the bytes behind these tensors, what several share once."""
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
