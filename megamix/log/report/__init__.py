"""A run afterwards, from its folder alone. It imports what stands above `report` in `log`. Begin with `page`.

goodput   what the wall time of a run went into
overview  how runs stand, a line for each
plot      curves and maps as pictures
page      page of a run: how it ended, what it learned, where its time went
"""
