# SPDX-License-Identifier: Apache-2.0
# Filters a header for doxygen (GNU sed -E -f): plain comments become documentation, line for line, so that
# line numbers stay. Of the block on top of a file, all behind the first paragraph is set as it stands; of any
# other block, what lies between the first and the last line that is indented by three columns or more.
1s,^// SPDX-License-Identifier: .*,,

# Explicit instantiations declare nothing new.
/^extern template/{
  :promise
  /;$/!{
    N
    b promise
  }
  s,[^\n]*,,g
}

/^#pragma once$/{
  N
  N
  /\n\n\/\/ /!b code
  # The block on top, marked by \x05 in place of the two lines ahead of it.
  s,.*\n,\x05,
  b block
}
/^ *\/\/ /!b code

# The whole block, and in the hold space the line behind it.
:block
$!N
/\n *\/\/[^\n]*$/{
  $!b block
}
h
s,\n[^\n]*$,,
x
s,.*\n,,
x
s,(^|\n|\x05) *//,\1,g

# Text that is set as it stands lies between \x01 and \x02.
/^\x05/{
  s,(\x05|\n)(\n|   ),\1\x01\2,
  /\x01/s,$,\x02,
}
/^\x05/!{
  s,(^|\n)(   [^\n]*),\1\x03\2\x04,g
  s,\x03,\x01,
  s,(.*)\x04,\1\x02,
  s,[\x03\x04],,g
}

# The rest is text for doxygen, which must not find tags or links in it.
s,[<>&#*_%],\\&,g
s,`([^`\n]*)`,<tt>\1</tt>,g
:stands
s,(\x01[^\x02]*)\\([<>&#*_%]),\1\2,
t stands
s,(\x01[^\x02]*)</?tt>,\1`,
t stands
s,\x01,@verbatim,
s,\x02, @endverbatim,
s,^\x05,@file\n\n,
s,.*,/** & */,
G

:code
s,(^|\n)(inline namespace HEED_ABI \{|\}  // namespace HEED_ABI),\1,
s,((^|\n) *[^ /\n][^\n]*[;\,] +)// ([^\n]*)$,\1///< \3,
