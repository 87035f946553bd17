package turnstile

import (
	"errors"
	"strconv"
)

// Options are the plugin's config table: integers, booleans and texts. An option that the policy does not ask for is
// unknown, and the plugin is refused.
type Options struct {
	members []member
	wrong   string
}

type member struct {
	name, json string
	known      bool
}

// Integer is an option from least to most.
func (o *Options) Integer(name string, otherwise, least, most int64) int64 {
	json, given := o.find(name)
	if !given {
		return otherwise
	}
	value, err := strconv.ParseInt(json, 10, 64)
	switch {
	case err != nil:
		o.fail(name, "must be an integer")
	case value < least || value > most:
		o.fail(name, "must be "+strconv.FormatInt(least, 10)+" to "+strconv.FormatInt(most, 10))
	}
	return value
}

// Flag is an option that is true or false.
func (o *Options) Flag(name string, otherwise bool) bool {
	json, given := o.find(name)
	if given && json != "true" && json != "false" {
		o.fail(name, "must be true or false")
	}
	if !given {
		return otherwise
	}
	return json == "true"
}

// Text is an option that is a text.
func (o *Options) Text(name, otherwise string) string {
	json, given := o.find(name)
	if !given {
		return otherwise
	}
	text, ok := unquote(json)
	if !ok {
		o.fail(name, "must be a text")
	}
	return text
}

// Names of the options that were given.
func (o *Options) Names() []string {
	names := make([]string, len(o.members))
	for i, member := range o.members {
		names[i] = member.name
	}
	return names
}

func (o *Options) find(name string) (json string, given bool) {
	for i := range o.members {
		if o.members[i].name == name {
			o.members[i].known = true
			return o.members[i].json, true
		}
	}
	return "", false
}

func (o *Options) fail(name, what string) {
	if o.wrong == "" {
		o.wrong = "option `" + name + "`: " + what
	}
}

// err tells the first thing that is wrong.
func (o *Options) err() error {
	for _, member := range o.members {
		if !member.known {
			o.fail(member.name, "unknown")
		}
	}
	if o.wrong == "" {
		return nil
	}
	return errors.New(o.wrong)
}

// parseOptions splits a JSON object into its members. The gateway writes the JSON, so it is sound.
func parseOptions(json []byte) *Options {
	options := &Options{}
	at := skipSpace(json, 0)
	for at < len(json) && (json[at] == '{' || json[at] == ',') {
		at = skipSpace(json, at+1)
		nameEnd := skipValue(json, at)
		name, ok := unquote(string(json[at:nameEnd]))
		at = skipSpace(json, nameEnd)
		if !ok || at >= len(json) || json[at] != ':' {
			break
		}
		at = skipSpace(json, at+1)
		end := skipValue(json, at)
		options.members = append(options.members, member{name: name, json: string(json[at:end])})
		at = skipSpace(json, end)
	}
	return options
}

func skipSpace(json []byte, at int) int {
	for at < len(json) && (json[at] == ' ' || json[at] == '\n' || json[at] == '\t' || json[at] == '\r') {
		at++
	}
	return at
}

// skipValue is the end of the value that begins at at.
func skipValue(json []byte, at int) int {
	depth := 0
	for ; at < len(json); at++ {
		switch json[at] {
		case '"':
			for at++; at < len(json) && json[at] != '"'; at++ {
				if json[at] == '\\' {
					at++
				}
			}
			if depth == 0 {
				return min(at+1, len(json))
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return at
			}
			if depth--; depth == 0 {
				return at + 1
			}
		case ',', ':', ' ', '\n', '\t', '\r':
			if depth == 0 {
				return at
			}
		}
	}
	return min(at, len(json))
}

// unquote reads a JSON text.
func unquote(json string) (string, bool) {
	if len(json) < 2 || json[0] != '"' || json[len(json)-1] != '"' {
		return "", false
	}
	text := make([]byte, 0, len(json))
	for i := 1; i < len(json)-1; i++ {
		if json[i] != '\\' {
			text = append(text, json[i])
			continue
		}
		i++
		switch json[i] {
		case 'n':
			text = append(text, '\n')
		case 't':
			text = append(text, '\t')
		case 'r':
			text = append(text, '\r')
		case 'b':
			text = append(text, '\b')
		case 'f':
			text = append(text, '\f')
		case 'u':
			if i+4 >= len(json) {
				return "", false
			}
			code, err := strconv.ParseUint(json[i+1:i+5], 16, 16)
			if err != nil {
				return "", false
			}
			text = append(text, string(rune(code))...)
			i += 4
		default:
			text = append(text, json[i])
		}
	}
	return string(text), true
}
