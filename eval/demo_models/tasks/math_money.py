"""Word problems about prices, pay and tickets."""
import random

from .split import Problem, first_quantity, number, pick
from .words import ITEMS, PEOPLE, PLACES


def shopping(rng: random.Random, held_out: bool) -> Problem:
    """Two to four kinds of goods, perhaps a coupon; asks for the total or the change."""
    name, he, _ = pick(rng, PEOPLE)
    goods = rng.sample(ITEMS, number(rng, 2, 4))
    parts, steps, costs = [], [], []
    for index, items in enumerate(goods):
        count = first_quantity(rng, 2, 12, held_out) if index == 0 else number(rng, 2, 9)
        price = number(rng, 2, 12)
        cost = count * price
        parts.append(f'{count} {items} for ${price} each')
        costs.append(cost)
        steps.append(pick(rng, [f'The {items} cost {count} * {price} = {cost} dollars.',
                                f'{count} {items} at ${price} cost {count} * {price} = {cost}.',
                                f'For the {items} {he} pays {count} * {price} = {cost} dollars.']))
    story = f'{name} buys ' + ', '.join(parts[:-1]) + ' and ' + parts[-1]
    story += pick(rng, ['.', f' at the {pick(rng, PLACES)}.'])
    total = costs[0]
    for cost in costs[1:]:
        steps.append(pick(rng, [f'Together that is {total} + {cost} = {total + cost} dollars.',
                                f'{total} + {cost} = {total + cost}.',
                                f'The sum so far is {total} + {cost} = {total + cost}.']))
        total += cost
    if rng.random() < 0.3 and total > 15:
        coupon = number(rng, 1, 9)
        story += pick(rng, [f' A coupon takes ${coupon} off the price.', f' {name} has a coupon for ${coupon}.'])
        steps.append(pick(rng, [f'The coupon lowers it to {total} - {coupon} = {total - coupon}.',
                                f'With the coupon: {total} - {coupon} = {total - coupon}.']))
        total -= coupon
    if rng.random() < 0.55:
        paid = (total // 50 + number(rng, 1, 2)) * 50
        change = paid - total
        story += pick(rng, [f' {he.capitalize()} pays with ${paid}. How much change does {he} get?',
                            f' How much money is left from ${paid}?',
                            f' {name} had ${paid}. How many dollars remain?'])
        steps.append(pick(rng, [f'The change is {paid} - {total} = {change} dollars.', f'{paid} - {total} = {change}.',
                                f'So {he} keeps {paid} - {total} = {change} dollars.']))
        return story, steps, change
    story += pick(rng, [f' How much does {he} pay in total?', ' What is the total cost in dollars?',
                        f' How many dollars does {name} spend?'])
    return story, steps, total


def wage(rng: random.Random, held_out: bool) -> Problem:
    """Hourly pay over some days, perhaps with a bonus and an expense."""
    name, he, his = pick(rng, PEOPLE)
    rate, hours, days = first_quantity(rng, 8, 30, held_out), number(rng, 3, 8), number(rng, 2, 6)
    daily = rate * hours
    total = daily * days
    story = pick(rng, [f'{name} earns ${rate} per hour and works {hours} hours a day for {days} days.',
                       f'A job pays ${rate} an hour. {name} works {days} days, {hours} hours each day.',
                       f'For {days} days {name} works {hours} hours daily and is paid ${rate} per hour.'])
    steps = [pick(rng, [f'Each day {he} earns {rate} * {hours} = {daily} dollars.',
                        f'One day pays {rate} * {hours} = {daily}.',
                        f'The daily pay is {rate} * {hours} = {daily} dollars.']),
             pick(rng, [f'In {days} days that is {daily} * {days} = {total}.',
                        f'Over {days} days {he} makes {daily} * {days} = {total} dollars.',
                        f'{daily} * {days} = {total}.'])]
    if rng.random() < 0.5:
        bonus = number(rng, 5, 60)
        story += pick(rng, [f' {he.capitalize()} also gets a bonus of ${bonus}.', f' A tip of ${bonus} is added.'])
        steps.append(pick(rng, [f'With the extra ${bonus}: {total} + {bonus} = {total + bonus}.',
                                f'Adding {bonus} gives {total} + {bonus} = {total + bonus}.']))
        total += bonus
    if rng.random() < 0.5:
        spent = number(rng, 5, min(60, total - 1))
        him = 'her' if his == 'her' else 'him'
        story += pick(rng, [f' {he.capitalize()} spends ${spent} on food.', f' The bus costs {him} ${spent}.'])
        steps.append(pick(rng, [f'After paying {spent} there is {total} - {spent} = {total - spent} left.',
                                f'{total} - {spent} = {total - spent}.']))
        total -= spent
    question = pick(rng, [f'How much money does {he} have?', 'How many dollars is that in the end?',
                          f'What amount does {name} keep?'])
    return story + ' ' + question, steps, total


def seats(rng: random.Random, held_out: bool) -> Problem:
    """Rows of seats, some of them empty; perhaps asks for the income of the tickets."""
    rows, columns = first_quantity(rng, 4, 30, held_out), number(rng, 4, 12)
    total = rows * columns
    empty = number(rng, 1, total // 2)
    place = pick(rng, PLACES)
    story = pick(rng, [f'A hall near the {place} has {rows} rows with {columns} seats each. {empty} seats are empty.',
                       f'In the {place} there are {rows} rows of {columns} chairs, and {empty} chairs are not used.',
                       f'Someone arranges {rows} rows of {columns} chairs at the {place}; {empty} of them stay free.'])
    answer = total - empty
    steps = [pick(rng, [f'There are {rows} * {columns} = {total} seats.',
                        f'The number of seats is {rows} * {columns} = {total}.', f'{rows} * {columns} = {total}.']),
             pick(rng, [f'Occupied seats: {total} - {empty} = {answer}.', f'{total} - {empty} = {answer} are taken.',
                        f'Without the empty ones we get {total} - {empty} = {answer}.'])]
    question = pick(rng, [' How many are occupied?', ' How many people sit down?'])
    if rng.random() < 0.5:
        price = number(rng, 2, 6)
        steps.append(pick(rng, [f'The tickets bring {answer} * {price} = {answer * price} dollars.',
                                f'{answer} * {price} = {answer * price}.']))
        answer *= price
        question = pick(rng, [f' Each visitor pays ${price}. How much money is collected?',
                              f' A ticket is ${price}. What is the income in dollars?'])
    return story + question, steps, answer
