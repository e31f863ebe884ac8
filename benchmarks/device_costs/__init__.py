"""The measurements of `device.py`.

device.py ─► copies     copies through the device, filling and copying at once, one kernel against many copies
          ├► boundary   moves of the boundary, and their planning
          ├► pinned     what pinned blocks take
          └► rounds     rounds in turn, and what they say; all of these use it
"""
