// SPDX-License-Identifier: Apache-2.0
#include "text_input.hpp"

namespace compare {

const std::string& default_text() {
  static const std::string text =
      R"(To attend is to leave most of the world alone. A listener in a crowded station follows one
voice, and the thousand others become weather. Nothing has gone silent; the ear has only decided
what to let through, and how loudly. The decision is made again with every syllable, so quickly
that it feels like no decision at all.

Hang two pendulums from the same beam and wait. At first they swing as strangers do. Then the beam,
which bends by less than the width of a hair, begins to carry news from one to the other, and by
evening they move together. No one told them to agree. Each gave a little, each took a little, and
what they had in common grew, while what they did not share was slowly worn away.

Memory works on both plans. A smell of wet slate calls up a schoolyard; the schoolyard calls up a
name; the name, once spoken, makes the slate wetter and the yard wider. What comes in wakes what is
stored, what is stored sharpens what comes in, and the loop closes or it does not. When it closes
we say that we have recognised something. When it fails to close we look again, ask a better
question, or admit that this is new and make a place for it.

How strict should the match be? A careless librarian puts every blue book on one shelf and finds
nothing. A fearful one gives each book a shelf of its own, and the building is soon too small. A
good one has a number in mind, never quite written down: close enough to share, far enough to part.
Raise the number and the world has many kinds of things; lower it and there are few.

There is also the art of the second look. Take what you believe and what speaks against it, and
hold both at once. Where they say the same, the noise has cancelled and you may keep the rest.
Where they differ, do not hurry to choose. Weigh the difference, move a little, and weigh it again.
After three or four such steps most quarrels have either settled or shown that they were about
something else, and the few that remain are worth the evening.

A weaver was asked how she kept so many threads in mind. I do not, she said. I keep the pattern,
and the pattern keeps the threads. When one is wrong, my hand stops before I know why. She had
woven for fifty years: mornings in grey, festivals in red, 1,204 ells of blue in the year of the
flood. "It is the same cloth," she said, "seen from different chairs."

So with a sentence. Each word looks back over those before it and asks of every one: how much of
you do I need? The answers add up to a whole, since there is only so much attention to give, and
what is granted here is taken from there. Some words ask for a subject, some for a rhyme, some only
for the nearest comma. By the last full stop, each has become a blend of what it was and what it
heard; and the reader, who has been doing the same all along, calls the blend a meaning.
)";
  return text;
}

}  // namespace compare
