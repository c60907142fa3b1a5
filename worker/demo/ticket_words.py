"""What tickets are made of: products, complaints, phrases. Every word is ours; nothing is from a real customer."""

from __future__ import annotations

from collections.abc import Mapping

PRODUCTS = (
    "battery", "blender", "cable", "camera", "charger", "compressor", "drill", "dryer", "fan", "freezer", "fridge",
    "grinder", "hammer", "headset", "heater", "hose", "iron", "kettle", "keyboard", "ladder", "lamp", "mixer",
    "monitor", "mower", "oven", "printer", "projector", "pump", "router", "sander", "saw", "scanner", "speaker",
    "toaster", "torch", "tripod", "vacuum", "valve", "washer", "wrench",
)  # fmt: skip

CUSTOMERS = (
    "Abel", "Adler", "Bauer", "Becker", "Berger", "Brandt", "Busch", "Carter", "Clark", "Cooper", "Davis", "Dietz",
    "Ellis", "Engel", "Evans", "Fischer", "Foster", "Fuchs", "Gibson", "Graf", "Haas", "Harris", "Hoffmann", "Hughes",
    "Jansen", "Jordan", "Keller", "Kelly", "Koch", "Lang", "Lewis", "Martin", "Meyer", "Murphy", "Neumann", "Otto",
    "Parker", "Peters", "Quinn", "Richter", "Roth", "Schmidt", "Taylor", "Vogel", "Wagner", "Walker", "Weber", "Young",
)  # fmt: skip

# Category -> what is said; {product} goes into the answer, {price}, {right_price} and {days} must not.
COMPLAINTS: Mapping[str, tuple[str, ...]] = {
    "delivery": (
        "My {product} has not arrived.",
        "The parcel with the {product} is late.",
        "Where is my {product}?",
        "I am still waiting for the {product}.",
        "The carrier lost the {product}.",
        "The {product} went to the wrong address.",
        "The tracking of my {product} has stopped.",
        "The {product} should have been here {days} days ago.",
    ),
    "invoice": (
        "I was billed twice for the {product}.",
        "The sum on the invoice for the {product} is wrong.",
        "I paid {price} too much for the {product}.",
        "The receipt for the {product} is missing.",
        "You charged {price} instead of {right_price} for the {product}.",
        "The discount on the {product} was not applied.",
        "The tax on the {product} is wrong.",
        "My card was charged again for the {product}.",
    ),
    "defect": (
        "My {product} does not start.",
        "The {product} leaks.",
        "The {product} makes a grinding sound.",
        "The {product} broke after {days} days.",
        "Smoke comes out of the {product}.",
        "The {product} stopped working.",
        "A part of the {product} is loose.",
        "The {product} gets too hot.",
    ),
    "return": (
        "I want to send the {product} back.",
        "The {product} is too small, please take it back.",
        "I would like my money back for the {product}.",
        "How do I return the {product}?",
        "Please send me a return label for the {product}.",
        "I have changed my mind about the {product}.",
        "I ordered the wrong {product} and want to exchange it.",
        "The {product} is still in its box, may it go back?",
    ),
    "question": (
        "Which oil does the {product} need?",
        "How do I clean the {product}?",
        "Is there a manual for the {product}?",
        "Can I use the {product} outside?",
        "How long may the {product} run?",
        "Does the {product} come with a spare part?",
        "How loud is the {product}?",
        "Is the {product} safe for children?",
    ),
}
OTHER_PRODUCT = ("Nothing is wrong with the {other}.", "I have no problem with the {other}.")
ORDER = (
    "Order {order}.",
    "My order number is {order}.",
    "It was order {order}.",
    "Order number: {order}.",
    "This is about order {order}.",
    "See order #{order}.",
)
URGENCY: Mapping[str, tuple[str, ...]] = {
    "high": (
        "I need this solved today.",
        "This is urgent.",
        "Please answer at once.",
        "We cannot work without it.",
        "I cannot wait any longer.",
        "It is an emergency.",
    ),
    "normal": ("", "Please let me know.", "I look forward to your answer."),
    "low": (
        "There is no hurry.",
        "Take your time.",
        "It can wait until next week.",
        "Answer whenever you like.",
        "It is not important.",
        "No need to answer soon.",
    ),
}
GREETINGS = ("", "Hello.", "Hi.", "Dear team.", "Good morning.")
NAME_FIRST = ("This is {customer}.", "My name is {customer}.", "{customer} here.")
NAME_LAST = ("Regards, {customer}", "Thank you, {customer}", "Best wishes, {customer}", "Yours, {customer}")
